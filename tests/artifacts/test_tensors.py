"""Values of every weight format against an independent computation."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from twinfire.artifacts.block_formats import BLOCK_FORMATS, CHUNK_VALUES
from twinfire.artifacts.tensors import MappedTensor

TYPES = {name: gguf.GGMLQuantizationType[name.upper()] for name in BLOCK_FORMATS}


def random_blocks(format_name: str, rows: int, columns: int) -> np.ndarray:
    """Return bytes that are valid blocks: any bits, but finite scales."""
    layout = BLOCK_FORMATS[format_name]
    row_bytes = columns // layout.values * layout.size_bytes
    raw = np.random.default_rng(3).integers(0, 256, (rows, row_bytes), dtype=np.uint8)
    blocks = raw.reshape(-1, layout.size_bytes)
    scales = np.random.default_rng(4).standard_normal((len(blocks), 2)).astype("<f2")
    if format_name == "q6_k":
        blocks[:, -2:] = scales[:, :1].view(np.uint8)
    else:
        num_bytes = 4 if format_name in ("q4_1", "q4_k") else 2
        blocks[:, :num_bytes] = scales.view(np.uint8)[:, :num_bytes]
    return raw


@pytest.mark.parametrize("format_name", sorted(BLOCK_FORMATS))
def test_block_formats_equal_the_librarys_values(format_name: str) -> None:
    rows = 3 * CHUNK_VALUES // 2 // 512 + 1
    raw = random_blocks(format_name, rows, 512)
    values = MappedTensor("w", (rows, 512), format_name, raw).to_float32()
    expected = gguf.dequantize(raw, TYPES[format_name])
    assert values.dtype == np.float32
    assert values.flags.c_contiguous
    np.testing.assert_array_equal(values, expected)


def test_block_rows_may_be_a_strided_view() -> None:
    raw = random_blocks("q8_0", 8, 64)
    values = MappedTensor("w", (4, 64), "q8_0", raw[::2]).to_float32()
    np.testing.assert_array_equal(values, gguf.dequantize(raw, TYPES["q8_0"])[::2])


def test_bf16_is_exact() -> None:
    bits = np.arange(0, 0x7F80, dtype=np.uint16).reshape(-1, 32)
    values = MappedTensor("w", bits.shape, "bf16", bits).to_float32()
    assert values[0, 0] == 0.0
    assert values.reshape(-1)[0x3F80] == 1.0
    assert values.reshape(-1)[0x4049] == np.float32(3.140625)
    np.testing.assert_array_equal(values.view(np.uint32) >> 16, bits)
    assert not (values.view(np.uint32) & 0xFFFF).any()


def test_f16_and_f32_keep_their_values() -> None:
    numbers = np.array([[1.5, -2.25, 65504.0], [0.0, 1e-7, -0.5]])
    for format_name, dtype in (("f16", "<f2"), ("f32", "<f4")):
        raw = numbers.astype(dtype)
        values = MappedTensor("w", (2, 3), format_name, raw).to_float32()
        np.testing.assert_array_equal(values, raw.astype(np.float32))


def test_unaligned_f32_becomes_aligned() -> None:
    buffer = b"\x00" + np.arange(6, dtype="<f4").tobytes()
    raw = np.frombuffer(buffer, "<f4", 6, 1).reshape(2, 3)
    values = MappedTensor("w", (2, 3), "f32", raw).to_float32()
    assert values.flags.aligned
    np.testing.assert_array_equal(values, np.arange(6).reshape(2, 3))
