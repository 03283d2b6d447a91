"""Matrices and rows for the native products, with what they stand for in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twinfire.kernels.cpu import _native

FloatArray = npt.NDArray[np.float32]
ByteArray = npt.NDArray[np.uint8]

WEIGHT_FORMATS = ("bf16", "int8", "q8_0", "q4_0", "q4_1")
BLOCK_FORMATS = ("q8_0", "q4_0", "q4_1")


def to_bf16(values: FloatArray) -> npt.NDArray[np.uint16]:
    """Round to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: npt.NDArray[np.uint16]) -> FloatArray:
    """Widen."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True)
class PackedWeights:
    """A packed matrix and the float32 values that its panels stand for."""

    matrix: _native.PackedMatrix
    panels: ByteArray
    values: FloatArray
    bias: FloatArray | None


def as_bytes(array: npt.NDArray[np.generic]) -> ByteArray:
    """Return the memory of an array."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def pack(
    format_name: str,
    parts: list[tuple[str, ByteArray]],
    n: int,
    k: int,
    *,
    gated: bool = False,
    bias: FloatArray | None = None,
    isa: str | None = None,
) -> PackedWeights:
    """Pack parts that lie as on disk; the values are read back row by row."""
    num_bytes = _native.PackedMatrix.num_bytes_of(format_name, n, k, gated, bias is not None)
    panels = _native.allocate_bytes(num_bytes)
    matrix = _native.PackedMatrix(format_name, n, k, gated, bias is not None, panels)
    _native.pack_panels(matrix, panels, parts, bias, 0, matrix.num_panels, isa)
    values = np.empty((n, k), np.float32)
    for row in range(n):
        _native.row_to_f32(matrix, row, values[row], isa)
    return PackedWeights(matrix, panels, values, bias)


def random_weights(
    format_name: str,
    n: int,
    k: int,
    *,
    seed: int = 0,
    gated: bool = False,
    has_bias: bool = False,
    isa: str | None = None,
) -> PackedWeights:
    """Pack Gaussian weights."""
    random = np.random.default_rng(seed)
    values = random.normal(0, k**-0.5, (n, k)).astype(np.float32)
    bias = random.normal(0, 1, n).astype(np.float32) if has_bias else None
    return pack(format_name, [("f32", as_bytes(values))], n, k, gated=gated, bias=bias, isa=isa)


def activation_rows(x: FloatArray, format_name: str, isa: str | None = None) -> ByteArray:
    """Return rows as a matrix reads them."""
    row_bytes = _native.activation_row_bytes(format_name, x.shape[1])
    rows = np.zeros((len(x), row_bytes), np.uint8)
    _native.write_activation_rows(np.ascontiguousarray(x), format_name, rows, isa)
    return rows


def row_values(rows: ByteArray, format_name: str, k: int) -> npt.NDArray[np.float64]:
    """Return what activation rows stand for."""
    padded = -(-k // 32) * 32
    if format_name == "bf16":
        return from_bf16(rows[:, : 2 * k].copy().view(np.uint16)).astype(np.float64)
    group = padded if format_name == "int8" else 32
    count = padded // group
    values = rows[:, :padded].view(np.int8).astype(np.float64)
    scales = rows[:, padded : padded + 4 * count].copy().view(np.float32).astype(np.float64)
    return (values * np.repeat(scales, group, axis=1))[:, :k]


def product(
    weights: PackedWeights,
    rows: ByteArray,
    epilogue: str = "store_f32",
    *,
    team: _native.ThreadTeam | None = None,
    isa: str | None = None,
) -> FloatArray:
    """Return a product whose epilogue stores float32."""
    out = np.zeros((len(rows), weights.matrix.out_columns), np.float32)
    _native.gemm(weights.matrix, rows, epilogue, out.view(np.uint8), team, isa)
    return out
