"""Ops on single rows against their torch twins, on every instruction set."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twinfire.kernels.cpu import _native
from twinfire.kernels.torch.exact import ExactNumerics

ISAS = _native.supported_isas()
ROW_FORMATS = ["f32", "bf16", "int8", "int8_groups"]
TORCH = ExactNumerics()
WIDTHS = st.sampled_from([1, 15, 16, 17, 32, 40, 63, 64, 100, 576, 1_003])


def padded(width: int) -> int:
    return -(-width // 32) * 32


def values_of(rows: np.ndarray, row_format: str, width: int) -> np.ndarray:
    """Return what rows of a format stand for."""
    if row_format == "f32":
        return rows.view(np.float32)[:, :width]
    if row_format == "bf16":
        wide = rows.view(np.uint16)[:, :width].astype(np.uint32) << 16
        return wide.view(np.float32)
    size = padded(width)
    groups = size // 32 if row_format == "int8_groups" else 1
    values = rows[:, :size].view(np.int8).reshape(len(rows), groups, -1)
    scales = rows[:, size : size + 4 * groups].copy().view(np.float32)
    sums = rows[:, size + 4 * groups : size + 8 * groups].copy().view(np.int32)
    np.testing.assert_array_equal(sums, values.sum(axis=2, dtype=np.int32))
    return (values * scales[..., None]).reshape(len(rows), size)[:, :width]


def check_rows(rows: np.ndarray, row_format: str, expected: np.ndarray) -> None:
    width = expected.shape[1]
    step = {"f32": 2e-6, "bf16": 2.0**-8}.get(row_format)
    if step is not None:
        allowed = np.abs(expected) * step + 1e-6
    else:
        span = 32 if row_format == "int8_groups" else padded(width)
        groups = np.pad(np.abs(expected), ((0, 0), (0, padded(width) - width)))
        largest = groups.reshape(len(expected), -1, span).max(axis=2, keepdims=True)
        allowed = np.broadcast_to(largest / 253, (*largest.shape[:2], span))
        allowed = allowed.reshape(len(expected), -1)[:, :width] + 1e-6
    assert (np.abs(values_of(rows, row_format, width) - expected) <= allowed).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("row_format", ROW_FORMATS)
@settings(max_examples=15, deadline=None)
@given(width=WIDTHS, num_rows=st.integers(1, 9), adds=st.booleans(), seed=st.integers(0, 2**32))
def test_norms_as_torch_does(
    isa: str, row_format: str, width: int, num_rows: int, adds: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    residual = rng.standard_normal((num_rows, width)).astype(np.float32) * 3
    added = rng.standard_normal((num_rows, width)).astype(np.float32) if adds else None
    weight = rng.uniform(0.2, 2.0, width).astype(np.float32)
    total = residual if added is None else residual + added
    expected = TORCH.rms_norm(torch.from_numpy(total), torch.from_numpy(weight), 1e-5).numpy()
    stream = residual.copy()
    rows = _native.rms_norm(isa, stream, added, weight, 1e-5, row_format)
    np.testing.assert_array_equal(stream, total)
    check_rows(rows, row_format, expected)
    alone = [
        _native.rms_norm(
            isa,
            residual[i : i + 1].copy(),
            None if added is None else added[i : i + 1],
            weight,
            1e-5,
            row_format,
        )
        for i in range(num_rows)
    ]
    np.testing.assert_array_equal(rows, np.concatenate(alone))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("row_format", ROW_FORMATS)
@settings(max_examples=15, deadline=None)
@given(width=WIDTHS, num_rows=st.integers(1, 9), seed=st.integers(0, 2**32))
def test_gates_as_torch_does(
    isa: str, row_format: str, width: int, num_rows: int, seed: int
) -> None:
    gate_up = np.random.default_rng(seed).standard_normal((num_rows, 2 * width)).astype(np.float32)
    gate_up *= 6
    gate_up[0, 0] = -100.0
    expected = TORCH.silu_mul(torch.from_numpy(gate_up)).numpy()
    rows = _native.silu_mul(isa, gate_up, row_format)
    check_rows(rows, row_format, expected)
    alone = [_native.silu_mul(isa, gate_up[i : i + 1], row_format) for i in range(num_rows)]
    np.testing.assert_array_equal(rows, np.concatenate(alone))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("row_format", ROW_FORMATS)
@settings(max_examples=15, deadline=None)
@given(width=WIDTHS, seed=st.integers(0, 2**32))
def test_rows_in_another_format_stand_for_the_same_values(
    isa: str, row_format: str, width: int, seed: int
) -> None:
    rows = np.random.default_rng(seed).standard_normal((5, width)).astype(np.float32)
    rows[3] = 0.0
    check_rows(_native.convert_rows(isa, rows, row_format), row_format, rows)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("width", [1, 16, 40, 576])
def test_embeds_every_plain_format_exactly(isa: str, width: int) -> None:
    rng = np.random.default_rng(width)
    table = rng.standard_normal((50, width)).astype(np.float32)
    table[7] *= 1e-6  # subnormal in half precision
    ids = np.array([49, 0, 7, 7, 31], np.int32)
    np.testing.assert_array_equal(_native.embed_f32(isa, table, ids), table[ids])
    half = table.astype(np.float16)
    np.testing.assert_array_equal(
        _native.embed_f16(isa, half.view(np.uint16), ids), half[ids].astype(np.float32)
    )
    brain = torch.from_numpy(table).bfloat16()
    np.testing.assert_array_equal(
        _native.embed_bf16(isa, brain.view(torch.uint16).numpy(), ids), brain.float().numpy()[ids]
    )


def test_takes_rows() -> None:
    rows = np.random.default_rng(0).standard_normal((9, 33)).astype(np.float32)
    indices = np.array([8, 0, 3, 3], np.int32)
    np.testing.assert_array_equal(_native.take_rows(rows, indices), rows[indices])
    with pytest.raises(ValueError, match="past"):
        _native.take_rows(rows, np.array([9], np.int32))


def test_rope_factors_are_those_of_float32_angles() -> None:
    positions = np.array([0, 1, 77, 131_071], np.int32)
    inv_freq = (500_000.0 ** (-np.arange(20) / 20)).astype(np.float32)
    factors = _native.rope_factors(positions, inv_freq, 1.3)
    angles = (positions.astype(np.float32)[:, None] * inv_freq).astype(np.float64)
    expected = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * np.float32(1.3)
    np.testing.assert_allclose(factors, expected, rtol=1e-6, atol=1e-7)
