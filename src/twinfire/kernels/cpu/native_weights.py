"""Weights of one model as the native kernels read them.

Implements `WeightOps`: first every matrix is only declared, because how it is packed depends on
how the model uses it; `pack` then finds all of them packed by an earlier start, or reads each from
its mapping once, on all threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twinfire.artifacts.tensors import MappedTensor
from twinfire.kernels.cpu._native import PackedMatrix, allocate_bytes, pack_panels
from twinfire.kernels.cpu.packed_file import MatrixShape
from twinfire.kernels.cpu.weight_cache import WeightCache
from twinfire.kernels.cpu.weight_formats import packed_format
from twinfire.kernels.ops import EmbeddingRef, LinearRef, RopeRef, RopeTable, VectorRef
from twinfire.protocol.worker_config import Quantization

Bytes = npt.NDArray[np.uint8]
Float32Array = npt.NDArray[np.float32]

_PACKED_DIRECTLY = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1")
_PLAIN_TABLES = ("f32", "f16", "bf16")
_PANELS_AT_ONCE = 16
"""Small enough to share a model's largest matrix evenly, large enough to be worth a task."""

_MATRICES_AHEAD = 8
"""How far reading is ahead of packing: enough for a disk to be always busy."""
_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class PlainTable:
    """Embedding rows as they lie in the mapped file."""

    content: Bytes
    format: str


@dataclass(frozen=True, slots=True)
class DeclaredMatrix:
    """A matrix before it is packed."""

    parts: tuple[MappedTensor, ...]
    biases: tuple[MappedTensor, ...]

    @property
    def num_rows(self) -> int:
        """Rows of all parts."""
        return sum(part.shape[0] for part in self.parts)

    @property
    def width(self) -> int:
        """Columns."""
        return self.parts[0].shape[1]

    @property
    def disk_bytes(self) -> int:
        """Bytes of all parts on disk."""
        return sum(part.raw.nbytes for part in self.parts)

    @property
    def description(self) -> str:
        """Which tensors these are and in what format."""
        return ";".join(f"{t.name}:{t.format}" for t in (*self.parts, *self.biases))


@dataclass(frozen=True, slots=True)
class MatrixUse:
    """How a model uses a matrix."""

    is_gated: bool = False
    """Its result goes through silu(first half) * second half."""
    is_head: bool = False
    """Its result is the logits."""


class NativeWeights:
    """All weights of a model. `on_bytes` is told of the disk bytes of each tensor once it is in."""

    def __init__(
        self,
        quantization: Quantization,
        num_threads: int,
        on_bytes: Callable[[int], None],
        cache: WeightCache | None = None,
    ) -> None:
        self._quantization = quantization
        self._num_threads = num_threads
        self._on_bytes = on_bytes
        self._cache = cache
        self._declared: list[DeclaredMatrix] = []
        self._matrices: list[PackedMatrix] = []
        self._vectors: list[Float32Array] = []
        self._tables: list[MappedTensor] = []
        self._packed_tables: dict[int, PackedMatrix] = {}
        self._rope_tables: list[RopeTable] = []
        self._unsaved: list[tuple[MatrixShape, Bytes]] = []
        self._sources = ""

    @property
    def num_bytes(self) -> int:
        """Memory of all weights; rows that stay in a mapped file are not counted."""
        matrices = {id(m): m.num_bytes for m in (*self._matrices, *self._packed_tables.values())}
        return sum(matrices.values()) + sum(vector.nbytes for vector in self._vectors)

    @property
    def main_format(self) -> str:
        """The packed format that holds the most bytes."""
        sizes: Counter[str] = Counter()
        for matrix in self._matrices:
            sizes[matrix.format] += matrix.num_bytes
        return sizes.most_common(1)[0][0]

    def linear(
        self, parts: Sequence[MappedTensor], biases: Sequence[MappedTensor] = ()
    ) -> LinearRef:
        """Declare a matrix of parts one above the other."""
        matrix = DeclaredMatrix(tuple(parts), tuple(biases))
        self._declared.append(matrix)
        return LinearRef(len(self._declared) - 1, matrix.width, matrix.num_rows)

    def vector(self, tensor: MappedTensor) -> VectorRef:
        """Keep a vector."""
        self._vectors.append(np.ascontiguousarray(tensor.to_float32()))
        self._on_bytes(tensor.raw.nbytes)
        return VectorRef(len(self._vectors) - 1, tensor.shape[0])

    def embedding(self, tensor: MappedTensor) -> EmbeddingRef:
        """Keep a table of rows."""
        self._tables.append(tensor)
        return EmbeddingRef(len(self._tables) - 1, tensor.shape[1])

    def rope(self, table: RopeTable) -> RopeRef:
        """Keep rotary frequencies."""
        self._rope_tables.append(table)
        return RopeRef(len(self._rope_tables) - 1)

    def pack(self, uses: dict[int, MatrixUse]) -> None:
        """Pack every declared matrix for its use, by the index of its reference; once."""
        assert not self._matrices, "weights are packed once"
        declared = list(self._declared)
        shapes = [self._shape(d, uses.get(i, MatrixUse())) for i, d in enumerate(declared)]
        places = {}
        for index, table in enumerate(self._tables):
            if table.format not in _PLAIN_TABLES:
                places[index] = self._place_of_table(table, declared, shapes)
        matrices = self._loaded(declared, shapes) or self._packed(declared, shapes)
        self._matrices = matrices[: len(self._declared)]
        self._packed_tables = {index: matrices[place] for index, place in places.items()}

    def save(self, after_write: Callable[[], None] = lambda: None) -> None:
        """Keep what `pack` had to make itself for the next start."""
        unsaved, self._unsaved = self._unsaved, []
        if self._cache is not None and unsaved:
            self._cache.save(unsaved, self._sources, after_write)

    def matrix_at(self, ref: LinearRef) -> PackedMatrix:
        """Return a packed matrix."""
        return self._matrices[ref.index]

    def vector_at(self, ref: VectorRef) -> Float32Array:
        """Return a vector."""
        return self._vectors[ref.index]

    def embedding_at(self, ref: EmbeddingRef) -> PackedMatrix | PlainTable:
        """Return a table: packed where its blocks have to be decoded, else as it lies on disk."""
        packed = self._packed_tables.get(ref.index)
        if packed is not None:
            return packed
        table = self._tables[ref.index]
        return PlainTable(_content(table.raw), table.format)

    def rope_at(self, ref: RopeRef) -> RopeTable:
        """Return rotary frequencies."""
        return self._rope_tables[ref.index]

    def _place_of_table(
        self, table: MappedTensor, declared: list[DeclaredMatrix], shapes: list[MatrixShape]
    ) -> int:
        """Return which matrix holds the rows of `table`, added to both lists if none does."""
        for index, (matrix, shape) in enumerate(zip(declared, shapes, strict=True)):
            if [part.name for part in matrix.parts] == [table.name] and not shape.gated:
                return index
        declared.append(DeclaredMatrix((table,), ()))
        shapes.append(self._shape(declared[-1], MatrixUse(is_head=True)))
        return len(declared) - 1

    def _shape(self, declared: DeclaredMatrix, use: MatrixUse) -> MatrixShape:
        formats = [part.format for part in declared.parts]
        format_name = packed_format(formats, self._quantization, is_head=use.is_head)
        rows, width, has_bias = declared.num_rows, declared.width, bool(declared.biases)
        return MatrixShape(format_name, rows, width, use.is_gated, has_bias)

    def _loaded(
        self, declared: list[DeclaredMatrix], shapes: list[MatrixShape]
    ) -> list[PackedMatrix] | None:
        if self._cache is None:
            return None
        self._sources = "|".join(matrix.description for matrix in declared)
        with self._threads() as pool:
            found = self._cache.load(shapes, self._sources, pool)
        if found is None:
            return None
        self._on_bytes(sum(matrix.disk_bytes for matrix in declared))
        return [shape.over(panels) for shape, panels in zip(shapes, found, strict=True)]

    def _packed(
        self, declared: list[DeclaredMatrix], shapes: list[MatrixShape]
    ) -> list[PackedMatrix]:
        matrices = []
        with self._threads() as pool, ThreadPoolExecutor(1, thread_name_prefix="read") as reader:
            for matrix in declared[:_MATRICES_AHEAD]:
                reader.submit(_touch, matrix)
            for index, (matrix, shape) in enumerate(zip(declared, shapes, strict=True)):
                for later in declared[index + _MATRICES_AHEAD : index + _MATRICES_AHEAD + 1]:
                    reader.submit(_touch, later)
                matrices.append(self._packed_matrix(pool, matrix, shape))
        return matrices

    def _packed_matrix(
        self, pool: ThreadPoolExecutor, declared: DeclaredMatrix, shape: MatrixShape
    ) -> PackedMatrix:
        panels = allocate_bytes(shape.num_bytes)
        matrix = shape.over(panels)
        parts = [_source(part) for part in declared.parts]
        has_bias = bool(declared.biases)
        bias = np.concatenate([b.to_float32() for b in declared.biases]) if has_bias else None
        starts = range(0, matrix.num_panels, _PANELS_AT_ONCE)

        def fill(first: int) -> None:
            last = min(first + _PANELS_AT_ONCE, matrix.num_panels)
            pack_panels(matrix, panels, parts, bias, first, last)

        list(pool.map(fill, starts))
        if self._cache is not None:
            self._unsaved.append((shape, panels))
        self._on_bytes(declared.disk_bytes)
        return matrix

    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._num_threads, thread_name_prefix="pack")


def _touch(matrix: DeclaredMatrix) -> None:
    """Read a matrix from disk, so that the threads that pack find it in memory."""
    for part in matrix.parts:
        _content(part.raw)[::_PAGE_BYTES].max()


def _source(part: MappedTensor) -> tuple[str, Bytes]:
    if part.format in _PACKED_DIRECTLY:
        return part.format, _content(part.raw)
    return "f32", _content(part.to_float32())


def _content(array: npt.NDArray[np.generic]) -> Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
