"""Weights packed piece by piece from their files are those packed whole from memory."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.native_matrices import FloatArray, as_bytes, to_bf16
from twinfire.artifacts.gguf_file import GgufFile
from twinfire.artifacts.gguf_source import GgufSource
from twinfire.artifacts.mapped_file import FileRange, MappedFile
from twinfire.artifacts.tensors import MappedTensor, halves_in_order
from twinfire.kernels.cpu import _native
from twinfire.kernels.cpu.packed_file import MatrixShape
from twinfire.kernels.cpu.slabs import Bytes, DeclaredMatrix, cut
from twinfire.kernels.cpu.weight_loader import load_panels
from twinfire.protocol.errors import ModelError

K = 64
ROWS = np.random.default_rng(0).normal(0, 0.05, (600, K)).astype(np.float32)


def write_bf16(path: Path, tensors: dict[str, FloatArray], heads: int = 0) -> list[MappedTensor]:
    """Write rows one tensor after the other, after a few odd bytes; heads interleaved if wanted."""
    stored = {name: to_bf16(values) for name, values in tensors.items()}
    if heads:
        # The inverse of what reading does: the two halves of each head alternate.
        for name, rows in stored.items():
            halves = rows.reshape(heads, 2, -1, rows.shape[1])
            stored[name] = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)
    path.write_bytes(b"odd" + b"".join(rows.tobytes() for rows in stored.values()))
    file, offset, read = MappedFile(path), 3, []
    for name, rows in stored.items():
        place = FileRange(file, offset, rows.nbytes)
        raw = place.array(np.dtype(np.uint16)).reshape(rows.shape)
        view = halves_in_order(raw, heads) if heads else raw
        read.append(MappedTensor(name, rows.shape, "bf16", view, place, heads))
        offset += rows.nbytes
    return read


def packed_whole(shape: MatrixShape, values: FloatArray, bias: FloatArray | None = None) -> Bytes:
    panels = _native.allocate_bytes(shape.num_bytes)
    matrix = shape.over(panels)
    parts = [("bf16", as_bytes(to_bf16(values)))]
    _native.pack_panels(matrix, panels, parts, bias, 0, matrix.num_panels)
    return panels


@settings(max_examples=80, deadline=None)
@given(
    part_rows=st.lists(st.integers(1, 150), min_size=1, max_size=4),
    gated=st.booleans(),
    has_bias=st.booleans(),
    format_name=st.sampled_from(["bf16", "int8", "q8_0", "q4_0"]),
    slab_bytes=st.sampled_from([1, 20_000, 1 << 20]),
)
def test_pieces_make_the_whole(
    part_rows: list[int], gated: bool, has_bias: bool, format_name: str, slab_bytes: int
) -> None:
    n = sum(part_rows)
    part_rows[-1] += gated * (n % 2)
    values = ROWS[: sum(part_rows)]
    ends = np.cumsum(part_rows)
    pieces = np.split(values, ends[:-1])
    parts = [MappedTensor(f"w{i}", p.shape, "bf16", to_bf16(p)) for i, p in enumerate(pieces)]
    bias = values[:, 0].copy()
    biases = [MappedTensor("b", bias.shape, "f32", bias)] if has_bias else []
    shape = MatrixShape(format_name, len(values), K, gated, has_bias)
    panels = _native.allocate_bytes(shape.num_bytes)
    for slab in cut(DeclaredMatrix(tuple(parts), tuple(biases)), shape, panels, slab_bytes):
        sources = [
            ("bf16", as_bytes(span.tensor.raw[span.first : span.last])) for span in slab.spans
        ]
        matrix = slab.shape.over(slab.panels)
        _native.pack_panels(matrix, slab.panels, sources, slab.bias, 0, matrix.num_panels)
    expected = packed_whole(shape, values, bias if has_bias else None)
    np.testing.assert_array_equal(panels, expected)


@pytest.mark.parametrize("heads", [0, 2, 5, 25])
@pytest.mark.parametrize("gated", [False, True])
def test_files_are_packed_in_any_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heads: int, gated: bool
) -> None:
    monkeypatch.setattr("twinfire.kernels.cpu.weight_loader.SLAB_BYTES", 128 * K)
    first, second = write_bf16(tmp_path / "b", {"x": ROWS[:200], "y": ROWS[200:500]}, heads)
    (third,) = write_bf16(tmp_path / "a", {"z": ROWS[:100]})
    shapes = [MatrixShape("bf16", 500, K, gated, False), MatrixShape("q8_0", 100, K, False, False)]
    declared = [DeclaredMatrix((second, first), ()), DeclaredMatrix((third,), ())]
    told: list[int] = []
    panels = load_panels(list(zip(declared, shapes, strict=True)), [third], 2, told.append)
    stacked = np.concatenate([ROWS[200:500], ROWS[:200]])
    np.testing.assert_array_equal(panels[0], packed_whole(shapes[0], stacked))
    np.testing.assert_array_equal(panels[1], packed_whole(shapes[1], ROWS[:100]))
    assert sum(told) == sum(matrix.disk_bytes for matrix in declared)


def test_blocks_of_256_are_decoded_piece_by_piece(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 256, (70, 210), dtype=np.uint8)
    blocks[:, 208:] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("blk.0.ffn_up.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q6_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = GgufSource(GgufFile(tmp_path / "m.gguf"), {})
    tensor = source.tensor("model.layers.0.mlp.up_proj.weight")
    shape = MatrixShape("bf16", 70, 256, False, False)
    (panels,) = load_panels([(DeclaredMatrix((tensor,), ()), shape)], [], 2, lambda _: None)
    whole = _native.allocate_bytes(shape.num_bytes)
    parts = [("f32", as_bytes(tensor.to_float32()))]
    _native.pack_panels(shape.over(whole), whole, parts, None, 0, 2)
    np.testing.assert_array_equal(panels, whole)


def test_interleaved_vectors_are_read_in_order(tmp_path: Path) -> None:
    values = ROWS[:60, :1]
    (tensor,) = write_bf16(tmp_path / "bias", {"b": values}, heads=3)
    np.testing.assert_array_equal(tensor.read_float32(), tensor.to_float32())
    assert tensor.read_float32().shape == (60, 1)


def test_a_file_that_was_cut_off_since_ends_the_load(tmp_path: Path) -> None:
    (tensor,) = write_bf16(tmp_path / "w", {"w": ROWS})
    os.truncate(tmp_path / "w", 4096)
    shape = MatrixShape("bf16", len(ROWS), K, False, False)
    with pytest.raises(ModelError, match="was cut off at byte 4096"):
        load_panels([(DeclaredMatrix((tensor,), ()), shape)], [], 2, lambda _: None)
