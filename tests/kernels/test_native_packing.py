"""Packing against what the disk formats say, and rows read back out of panels."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from support.native_matrices import (
    BLOCK_FORMATS,
    WEIGHT_FORMATS,
    FloatArray,
    as_bytes,
    from_bf16,
    pack,
    random_weights,
    to_bf16,
)
from twinfire.kernels.cpu import _native

every_isa = pytest.mark.parametrize("isa", _native.supported_isas())
TYPES = {
    "q8_0": GGMLQuantizationType.Q8_0,
    "q4_0": GGMLQuantizationType.Q4_0,
    "q4_1": GGMLQuantizationType.Q4_1,
}
SHAPES = [(64, 32), (70, 96), (1, 320), (200, 64)]


def gaussian(n: int, k: int) -> FloatArray:
    return np.random.default_rng(n * k).normal(0, 0.05, (n, k)).astype(np.float32)


@every_isa
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("format_name", BLOCK_FORMATS)
def test_blocks_keep_their_values_and_their_size(
    isa: str, format_name: str, n: int, k: int, gated: bool
) -> None:
    n += gated * (n % 2)
    blocks = quants.quantize(gaussian(n, k), TYPES[format_name])
    packed = pack(format_name, [(format_name, as_bytes(blocks))], n, k, gated=gated, isa=isa)
    assert np.array_equal(packed.values, quants.dequantize(blocks, TYPES[format_name]))
    if n % 64 == 0:
        assert packed.matrix.num_bytes == blocks.nbytes


@every_isa
@pytest.mark.parametrize("source", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("n", "k"), [*SHAPES, (6, 45)])
def test_floats_become_the_nearest_bf16(isa: str, source: str, n: int, k: int, gated: bool) -> None:
    n += gated * (n % 2)
    values = gaussian(n, k)
    raw = {"f32": values, "f16": values.astype(np.float16), "bf16": to_bf16(values)}[source]
    read = from_bf16(raw) if source == "bf16" else raw.astype(np.float32)
    packed = pack("bf16", [(source, as_bytes(raw))], n, k, gated=gated, isa=isa)
    assert np.array_equal(packed.values, from_bf16(to_bf16(read)))


@every_isa
@pytest.mark.parametrize("source", BLOCK_FORMATS)
@pytest.mark.parametrize("target", WEIGHT_FORMATS)
def test_blocks_in_another_format_are_within_its_rounding(
    isa: str, source: str, target: str
) -> None:
    blocks = quants.quantize(gaussian(70, 96), TYPES[source])
    values = quants.dequantize(blocks, TYPES[source])
    packed = pack(target, [(source, as_bytes(blocks))], 70, 96, isa=isa)
    step = np.abs(values).max() * {"bf16": 2**-8, "int8": 1 / 250, "q8_0": 1 / 250}.get(
        target, 0.14
    )
    assert np.abs(packed.values - values).max() <= step


@every_isa
@pytest.mark.parametrize("format_name", BLOCK_FORMATS)
def test_rounding_to_blocks_is_that_of_gguf(isa: str, format_name: str) -> None:
    values = gaussian(64, 512)
    values[3, :32] = 0
    values[4, :32] = 0.25
    expected = quants.dequantize(quants.quantize(values, TYPES[format_name]), TYPES[format_name])
    packed = pack(format_name, [("f32", as_bytes(values))], 64, 512, isa=isa)
    # A value half way between two steps may go either way.
    same = packed.values == expected
    assert same.mean() > 0.999
    assert np.abs(packed.values - expected).max() <= np.abs(values).max() / 7


@every_isa
def test_parts_of_different_formats_lie_one_above_the_other(isa: str) -> None:
    first, second = gaussian(40, 64), gaussian(50, 64)
    blocks = quants.quantize(second, TYPES["q8_0"])
    parts = [("f32", as_bytes(first)), ("q8_0", as_bytes(blocks))]
    packed = pack("q8_0", parts, 90, 64, isa=isa)
    expected = quants.quantize(first, TYPES["q8_0"])
    assert np.array_equal(packed.values[40:], quants.dequantize(blocks, TYPES["q8_0"]))
    error = np.abs(packed.values[:40] - quants.dequantize(expected, TYPES["q8_0"]))
    assert error.max() <= np.abs(first).max() / 127 * 1.01


@every_isa
@pytest.mark.parametrize("format_name", WEIGHT_FORMATS)
def test_packing_in_pieces_gives_the_same_bytes(isa: str, format_name: str) -> None:
    values = gaussian(330, 96)
    bias = gaussian(1, 330)[0]
    packed = pack(format_name, [("f32", as_bytes(values))], 330, 96, bias=bias, isa=isa)
    panels = _native.allocate_bytes(packed.matrix.num_bytes)
    for panel in (4, 0, 2, 5, 1, 3):
        _native.pack_panels(
            packed.matrix, panels, [("f32", as_bytes(values))], bias, panel, panel + 1, isa
        )
    assert np.array_equal(panels, packed.panels)


@pytest.mark.parametrize("format_name", WEIGHT_FORMATS)
def test_every_instruction_set_packs_the_same_bytes(format_name: str) -> None:
    packed = [
        random_weights(format_name, 130, 96, gated=True, has_bias=True, isa=isa)
        for isa in _native.supported_isas()
    ]
    assert all(np.array_equal(packed[0].panels, other.panels) for other in packed)


def test_f16_scales_round_to_nearest_even() -> None:
    # The scale of a q8_0 block is max / 127, so every f16 neighbourhood can be asked for.
    scales = np.concatenate(
        [
            np.random.default_rng(3).uniform(1e-8, 1e-4, 400),
            np.geomspace(1e-7, 400, 600),
            np.array([2.0**-14, 2.0**-24, 2.0**-25, 1.5 * 2.0**-24, 6.1e-5]),
        ]
    ).astype(np.float32)
    values = np.zeros((len(scales), 32), np.float32)
    values[:, 0] = scales * 127
    packed = pack("q8_0", [("f32", as_bytes(values))], len(scales), 32)
    expected = (values[:, 0] / np.float32(127)).astype(np.float16).astype(np.float32) * 127
    assert np.array_equal(packed.values[:, 0], expected)


def test_wrong_sizes_are_refused() -> None:
    panels = _native.allocate_bytes(64 * 64 * 2)
    matrix = _native.PackedMatrix("bf16", 64, 64, False, False, panels)
    rows = as_bytes(gaussian(64, 64))
    with pytest.raises(ValueError, match="number of rows"):
        _native.pack_panels(matrix, panels, [("f32", rows[: 4 * 64])], None, 0, 1, None)
    with pytest.raises(ValueError, match="whole rows"):
        _native.pack_panels(matrix, panels, [("f32", rows[:-4])], None, 0, 1, None)
    with pytest.raises(ValueError, match="no such panels"):
        _native.pack_panels(matrix, panels, [("f32", rows)], None, 0, 2, None)
    with pytest.raises(ValueError, match="size"):
        _native.PackedMatrix("bf16", 65, 64, False, False, panels)
    odd = _native.allocate_bytes(_native.PackedMatrix.num_bytes_of("q8_0", 1, 40))
    odd_matrix = _native.PackedMatrix("q8_0", 1, 40, False, False, odd)
    with pytest.raises(ValueError, match="whole blocks"):
        _native.pack_panels(odd_matrix, odd, [("q8_0", rows[:34])], None, 0, 1, None)
