"""Packed and tiled multiplies against the plain one, over odd shapes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from twinfire.kernels.torch.linear import (
    OneDnnLinear,
    PlainLinear,
    TiledLinear,
    choose_packer,
)

CPU = torch.device("cpu")
SHAPES = [(1, 1), (7, 13), (64, 33), (130, 257), (96, 1536)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 16, 50])
def test_chosen_packer_equals_plain(
    out_features: int, in_features: int, biased: bool, rows: int
) -> None:
    weight, x = random(out_features, in_features), random(rows, in_features, seed=1)
    bias = random(out_features, seed=2) if biased else None
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        cast_bias = None if bias is None else bias.to(dtype)
        product = choose_packer(CPU, dtype)(weight.to(dtype), cast_bias)(x.to(dtype))
        expected = torch.nn.functional.linear(x.to(dtype), weight.to(dtype), cast_bias)
        assert product.shape == (rows, out_features)
        scale = float(in_features) ** 0.5
        torch.testing.assert_close(product, expected, rtol=tolerance, atol=tolerance * scale)


def test_onednn_is_chosen_where_torch_has_it() -> None:
    assert torch.backends.mkldnn.is_available()
    assert choose_packer(CPU, torch.float32) is OneDnnLinear


@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_tiled_rows_do_not_depend_on_their_company(out_features: int, in_features: int) -> None:
    pack = choose_packer(CPU, torch.float32)
    linear = TiledLinear(pack(random(out_features, in_features), None), tile_rows=16)
    x = random(150, in_features, seed=1)
    together = linear(x)
    for size in (1, 2, 5, 16, 17, 64):
        apart = torch.cat([linear(part.contiguous()) for part in x.split(size)])
        assert torch.equal(apart, together)


def test_tiles_all_have_one_shape() -> None:
    shapes = []

    class Recording:
        num_bytes = 0

        def __call__(self, x: Tensor) -> Tensor:
            shapes.append(tuple(x.shape))
            return x

    x = random(21, 3)
    assert torch.equal(TiledLinear(Recording(), tile_rows=8)(x), x)
    assert shapes == [(8, 3)] * 3


def test_plain_linear_counts_its_bytes() -> None:
    assert PlainLinear(random(3, 5), random(3)).num_bytes == (15 + 3) * 4
