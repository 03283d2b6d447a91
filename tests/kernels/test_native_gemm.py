"""The native products against float64 and against themselves, on every instruction set here."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.native_matrices import (
    BLOCK_FORMATS,
    WEIGHT_FORMATS,
    FloatArray,
    PackedWeights,
    activation_rows,
    from_bf16,
    product,
    random_weights,
    row_values,
)
from twinfire.kernels.cpu import _native

ISAS = _native.supported_isas()
every_isa = pytest.mark.parametrize("isa", ISAS)
every_format = pytest.mark.parametrize("format_name", WEIGHT_FORMATS)


def gaussian(num_rows: int, k: int, seed: int = 1) -> FloatArray:
    return np.random.default_rng(seed).normal(0, 1, (num_rows, k)).astype(np.float32)


def exact_product(weights: PackedWeights, x: FloatArray, isa: str) -> torch.Tensor:
    """The product of what the packed bytes and the quantised rows stand for, in float64."""
    input_format = weights.matrix.input_format
    rows = row_values(activation_rows(x, input_format, isa), input_format, x.shape[1])
    bias = None if weights.bias is None else torch.from_numpy(weights.bias).double()
    return torch.nn.functional.linear(
        torch.from_numpy(rows), torch.from_numpy(weights.values).double(), bias
    )


def assert_close(actual: FloatArray, expected: torch.Tensor, tolerance: float = 2e-5) -> None:
    scale = max(1.0, expected.abs().max().item())
    error = (torch.from_numpy(actual).double() - expected).abs().max().item()
    assert error <= tolerance * scale


@every_isa
@every_format
@settings(max_examples=12, deadline=None)
@given(
    num_rows=st.integers(1, 70),
    n=st.integers(1, 200),
    k=st.integers(1, 80),
    has_bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_products_are_those_of_the_stored_values(
    isa: str, format_name: str, num_rows: int, n: int, k: int, has_bias: bool, seed: int
) -> None:
    weights = random_weights(format_name, n, k, seed=seed, has_bias=has_bias, isa=isa)
    x = gaussian(num_rows, k, seed + 1)
    rows = activation_rows(x, weights.matrix.input_format, isa)
    assert_close(product(weights, rows, isa=isa), exact_product(weights, x, isa))


@every_isa
@every_format
@pytest.mark.parametrize(("num_rows", "n", "k"), [(1, 2200, 64), (97, 130, 1664), (200, 64, 1088)])
def test_products_of_many_rows_columns_and_blocks(
    isa: str, format_name: str, num_rows: int, n: int, k: int
) -> None:
    weights = random_weights(format_name, n, k, has_bias=True, isa=isa)
    x = gaussian(num_rows, k)
    rows = activation_rows(x, weights.matrix.input_format, isa)
    assert_close(product(weights, rows, isa=isa), exact_product(weights, x, isa))


@every_isa
@every_format
def test_a_row_has_the_same_bits_alone_and_in_any_batch_on_any_threads(
    isa: str, format_name: str
) -> None:
    weights = random_weights(format_name, 330, 1120, has_bias=True, isa=isa)
    rows = activation_rows(gaussian(200, 1120), weights.matrix.input_format, isa)
    whole = product(weights, rows, isa=isa)
    for count in (*range(1, 26), 48, 64, 97, 199):
        first = 200 - count
        part = product(weights, rows[first:], isa=isa)
        assert part.tobytes() == whole[first:].tobytes(), count
    for num_threads in (2, 3):
        team = _native.ThreadTeam(num_threads)
        assert product(weights, rows, team=team, isa=isa).tobytes() == whole.tobytes()
        assert product(weights, rows[:3], team=team, isa=isa).tobytes() == whole[:3].tobytes()


@every_isa
@every_format
def test_a_column_has_the_same_bits_in_any_matrix(isa: str, format_name: str) -> None:
    weights = random_weights(format_name, 2200, 96, isa=isa)
    rows = activation_rows(gaussian(5, 96), weights.matrix.input_format, isa)
    whole = product(weights, rows, isa=isa)
    # Scales come from rows of the matrix, so a matrix of some of its rows has the same values.
    few = random_weights(format_name, 70, 96, isa=isa)
    assert np.array_equal(few.values, weights.values[:70])
    assert product(few, rows, isa=isa).tobytes() == np.ascontiguousarray(whole[:, :70]).tobytes()


@every_isa
def test_adding_into_the_residual_rounds_once(isa: str) -> None:
    weights = random_weights("bf16", 90, 64, isa=isa)
    rows = activation_rows(gaussian(9, 64), "bf16", isa)
    residual = gaussian(9, 90, seed=5)
    expected = residual + product(weights, rows, isa=isa)
    _native.gemm(weights.matrix, rows, "add_f32", residual.view(np.uint8), None, isa)
    assert residual.tobytes() == expected.tobytes()


@every_isa
@pytest.mark.parametrize("n", [1, 31, 64, 100])
def test_bf16_results_are_the_rounded_ones_and_nothing_else_is_written(isa: str, n: int) -> None:
    weights = random_weights("bf16", n, 64, isa=isa)
    rows = activation_rows(gaussian(3, 64), "bf16", isa)
    out = np.full((3, n + 40), 7, np.uint16)
    _native.gemm(weights.matrix, rows, "store_bf16", out.view(np.uint8), None, isa)
    expected = torch.from_numpy(product(weights, rows, isa=isa)).bfloat16()
    assert torch.equal(torch.from_numpy(from_bf16(out[:, :n].copy())), expected.float())
    assert (out[:, n:] == 7).all()


@every_isa
@every_format
@pytest.mark.parametrize(("half", "k"), [(16, 32), (50, 96), (100, 640)])
@pytest.mark.parametrize("num_rows", [1, 7, 40])
def test_gated_products(isa: str, format_name: str, half: int, k: int, num_rows: int) -> None:
    weights = random_weights(format_name, 2 * half, k, gated=True, has_bias=True, isa=isa)
    x = gaussian(num_rows, k)
    rows = activation_rows(x, weights.matrix.input_format, isa)
    gate, up = exact_product(weights, x, isa).chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    gated = product(weights, rows, "silu_mul_f32", isa=isa)
    assert_close(gated, expected)

    row_bytes = _native.activation_row_bytes("bf16", half)
    stored = np.zeros((num_rows, row_bytes), np.uint8)
    _native.gemm(weights.matrix, rows, "silu_mul_bf16", stored, None, isa)
    assert np.array_equal(stored, activation_rows(gated, "bf16", isa))

    row_bytes = _native.activation_row_bytes("int8_groups", half)
    stored = np.zeros((num_rows, row_bytes), np.uint8)
    _native.gemm(weights.matrix, rows, "silu_mul_int8_groups", stored, None, isa)
    assert np.array_equal(stored, activation_rows(gated, "int8_groups", isa))


@every_isa
@pytest.mark.parametrize("format_name", ["int8", "int8_groups"])
@given(k=st.integers(1, 100), seed=st.integers(0, 1000), size=st.sampled_from([1e-35, 1e-3, 1e4]))
@settings(max_examples=20, deadline=None)
def test_quantised_rows(isa: str, format_name: str, k: int, seed: int, size: float) -> None:
    x = gaussian(3, k, seed) * np.float32(size)
    x[1] = 0
    rows = activation_rows(x, format_name, isa)
    padded = -(-k // 32) * 32
    group = padded if format_name == "int8" else 32
    count = padded // group
    values = rows[:, :padded].view(np.int8)
    scales = rows[:, padded : padded + 4 * count].copy().view(np.float32)
    sums = rows[:, padded + 4 * count : padded + 8 * count].copy().view(np.int32)
    grouped = np.pad(x, ((0, 0), (0, padded - k))).reshape(3, count, group)
    if size > 1e-30:
        np.testing.assert_allclose(scales, np.abs(grouped).max(axis=2) / 127, rtol=1e-6)
        error = np.abs(row_values(rows, format_name, k) - x)
        assert (error <= np.repeat(scales, group, axis=1)[:, :k] * 0.5001).all()
    assert not values[:, k:].any()
    assert np.array_equal(sums, values.reshape(3, count, group).sum(axis=2, dtype=np.int32))


@every_isa
@pytest.mark.parametrize("format_name", ["int8", *BLOCK_FORMATS])
def test_largest_values_do_not_overflow(isa: str, format_name: str) -> None:
    weights = random_weights(format_name, 64, 4096, isa=isa)
    x = np.where(gaussian(2, 4096) > 0, 1.0, -1.0).astype(np.float32)
    extreme = PackedWeights(weights.matrix, weights.panels, weights.values, None)
    rows = activation_rows(x, weights.matrix.input_format, isa)
    assert_close(product(extreme, rows, isa=isa), exact_product(extreme, x, isa))


def test_shapes_that_do_not_fit_are_refused() -> None:
    weights = random_weights("bf16", 64, 64)
    rows = activation_rows(gaussian(2, 64), "bf16")
    out = np.zeros((2, 256), np.uint8)
    with pytest.raises(ValueError, match="too short"):
        _native.gemm(weights.matrix, rows[:, :64].copy(), "store_f32", out, None, None)
    with pytest.raises(ValueError, match="too short"):
        _native.gemm(weights.matrix, rows, "store_f32", out[:, :128].copy(), None, None)
    with pytest.raises(ValueError, match="as many rows"):
        _native.gemm(weights.matrix, rows, "store_f32", out[:1], None, None)
    with pytest.raises(ValueError, match="silu"):
        _native.gemm(weights.matrix, rows, "silu_mul_f32", out, None, None)
    with pytest.raises(ValueError, match="unknown name"):
        _native.gemm(weights.matrix, rows, "store_f64", out, None, None)
