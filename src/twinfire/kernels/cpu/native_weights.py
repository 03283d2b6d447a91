"""Weights of one model as the native kernels read them.

Implements `WeightOps`: first every matrix is only declared, because how it is packed depends on
how the model uses it; `pack` then finds all of them packed by an earlier start, or loads them from
their files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twinfire.artifacts.tensors import MappedTensor
from twinfire.kernels.cpu._native import PackedMatrix
from twinfire.kernels.cpu.packed_file import MatrixShape
from twinfire.kernels.cpu.slabs import Bytes, DeclaredMatrix, Float32Array
from twinfire.kernels.cpu.weight_cache import WeightCache
from twinfire.kernels.cpu.weight_formats import packed_format
from twinfire.kernels.cpu.weight_loader import READS_AT_ONCE, load_panels
from twinfire.kernels.ops import EmbeddingRef, LinearRef, RopeRef, RopeTable, VectorRef
from twinfire.protocol.worker_config import Quantization

_PLAIN_TABLES = ("f32", "f16", "bf16")


@dataclass(frozen=True, slots=True)
class PlainTable:
    """Embedding rows as they lie in the mapped file."""

    content: Bytes
    format: str


@dataclass(frozen=True, slots=True)
class MatrixUse:
    """How a model uses a matrix."""

    is_gated: bool = False
    """Its result goes through silu(first half) * second half."""
    is_head: bool = False
    """Its result is the logits."""
    format: str | None = None
    """What it is packed as, in place of what follows from the quantisation."""


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
        self._tables: list[MappedTensor | PackedMatrix | PlainTable] = []
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
        self._vectors.append(np.ascontiguousarray(tensor.read_float32()))
        self._on_bytes(tensor.raw.nbytes)
        return VectorRef(len(self._vectors) - 1, tensor.shape[0])

    def embedding(self, tensor: MappedTensor) -> EmbeddingRef:
        """Keep a table of rows."""
        self._tables.append(tensor)
        return EmbeddingRef(len(self._tables) - 1, tensor.shape[1])

    def share_embedding(self, table: PackedMatrix | PlainTable, width: int) -> EmbeddingRef:
        """Take a table of other weights, packed already; theirs is the memory."""
        self._tables.append(table)
        return EmbeddingRef(len(self._tables) - 1, width)

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
        plain = []
        for index, table in enumerate(self._tables):
            if not isinstance(table, MappedTensor):
                continue
            place = self._place_of_table(table, declared, shapes)
            if place is not None:
                places[index] = place
            else:
                plain.append(table)
        matrices = self._loaded(declared, shapes, plain) or self._packed(declared, shapes, plain)
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
        if not isinstance(table, MappedTensor):
            return table
        return PlainTable(_content(table.raw), table.format)

    def rope_at(self, ref: RopeRef) -> RopeTable:
        """Return rotary frequencies."""
        return self._rope_tables[ref.index]

    def _place_of_table(
        self, table: MappedTensor, declared: list[DeclaredMatrix], shapes: list[MatrixShape]
    ) -> int | None:
        """Return which matrix holds the rows of `table`, None if they are best read from the file.

        Rows that have to be decoded get a matrix of their own where no other holds them.
        """
        for index, (matrix, shape) in enumerate(zip(declared, shapes, strict=True)):
            is_table = [part.name for part in matrix.parts] == [table.name] and not shape.gated
            if is_table and (table.format not in _PLAIN_TABLES or table.format == shape.format):
                return index
        if table.format in _PLAIN_TABLES:
            return None
        declared.append(DeclaredMatrix((table,), ()))
        shapes.append(self._shape(declared[-1], MatrixUse(is_head=True)))
        return len(declared) - 1

    def _shape(self, declared: DeclaredMatrix, use: MatrixUse) -> MatrixShape:
        formats = [part.format for part in declared.parts]
        format_name = use.format or packed_format(formats, self._quantization, is_head=use.is_head)
        rows, width, has_bias = declared.num_rows, declared.width, bool(declared.biases)
        return MatrixShape(format_name, rows, width, use.is_gated, has_bias)

    def _loaded(
        self,
        declared: list[DeclaredMatrix],
        shapes: list[MatrixShape],
        plain: list[MappedTensor],
    ) -> list[PackedMatrix] | None:
        if self._cache is None:
            return None
        self._sources = "|".join(matrix.description for matrix in declared)
        with self._threads() as pool:
            found = self._cache.load(shapes, self._sources, pool)
            if found is None:
                return None
            for table in plain:
                pool.submit(table.read_ahead)
        self._on_bytes(sum(matrix.disk_bytes for matrix in declared))
        return [shape.over(panels) for shape, panels in zip(shapes, found, strict=True)]

    def _packed(
        self,
        declared: list[DeclaredMatrix],
        shapes: list[MatrixShape],
        plain: list[MappedTensor],
    ) -> list[PackedMatrix]:
        matrices = list(zip(declared, shapes, strict=True))
        panels = load_panels(matrices, plain, self._num_threads, self._on_bytes)
        if self._cache is not None:
            self._unsaved = list(zip(shapes, panels, strict=True))
        return [shape.over(content) for shape, content in zip(shapes, panels, strict=True)]

    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(READS_AT_ONCE, thread_name_prefix="read")


def _content(array: npt.NDArray[np.generic]) -> Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
