"""Norm and gate of both strategies against float64, and rows that ignore their neighbours."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from twinfire.kernels.torch.exact import ExactNumerics
from twinfire.kernels.torch.fast import FastNumerics

WIDTHS = [1, 7, 48, 577, 1536]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


def expected_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x, weight = x.double(), weight.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def expected_gate(x: Tensor) -> Tensor:
    gate, up = x.double().chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


@pytest.mark.parametrize("width", WIDTHS)
def test_exact_against_float64(width: int) -> None:
    numerics, x, weight = ExactNumerics(), random(5, width), random(width, seed=1)
    normed = numerics.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(
        normed.double(), expected_norm(x, weight, 1e-5), rtol=1e-5, atol=1e-6
    )
    gate_up = random(5, 2 * width, seed=2)
    gated = numerics.silu_mul(gate_up)
    torch.testing.assert_close(gated.double(), expected_gate(gate_up), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", WIDTHS)
def test_fast_against_float64(width: int) -> None:
    numerics = FastNumerics(torch.device("cpu"), torch.bfloat16)
    x, weight = random(5, width).bfloat16(), random(width, seed=1).bfloat16()
    normed = numerics.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(
        normed.double(), expected_norm(x, weight, 1e-5), rtol=2e-2, atol=2e-2
    )
    gate_up = random(5, 2 * width, seed=2).bfloat16()
    expected = expected_gate(gate_up)
    torch.testing.assert_close(numerics.silu_mul(gate_up).double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("size", [1, 2, 3, 16, 100])
def test_exact_rows_do_not_depend_on_their_company(width: int, size: int) -> None:
    numerics, x, weight = ExactNumerics(), random(301, width), random(width, seed=1)
    gate_up = random(301, 2 * width, seed=2)
    normed, gated = numerics.rms_norm(x, weight, 1e-5), numerics.silu_mul(gate_up)
    parts = [numerics.rms_norm(part.contiguous(), weight, 1e-5) for part in x.split(size)]
    assert torch.equal(torch.cat(parts), normed)
    parts = [numerics.silu_mul(part.contiguous()) for part in gate_up.split(size)]
    assert torch.equal(torch.cat(parts), gated)


@pytest.mark.parametrize(("out_features", "in_features"), [(7, 13), (576, 1536)])
def test_exact_products_do_not_depend_on_their_company(out_features: int, in_features: int) -> None:
    linear = ExactNumerics().pack(random(out_features, in_features), random(out_features))
    x = random(40, in_features, seed=1)
    together = linear(x)
    for size in (1, 3, 17):
        parts = [linear(part.contiguous()) for part in x.split(size)]
        assert torch.equal(torch.cat(parts), together)
