"""How a matrix is packed piece by piece: which rows on disk each run of panels is made of.

A run of panels is packed exactly as a matrix of just its rows would be, so pieces need nothing
from each other and no tensor has to be in memory as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twinfire.artifacts.tensors import MappedTensor, halves_in_order
from twinfire.kernels.cpu.packed_file import MatrixShape

Bytes = npt.NDArray[np.uint8]
Float32Array = npt.NDArray[np.float32]

PANEL_COLUMNS = 64


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
class RowSpan:
    """Rows [first, last) of a tensor, in Hugging Face order."""

    tensor: MappedTensor
    first: int
    last: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows on disk."""
        return (self.last - self.first) * self.tensor.row_bytes

    @property
    def rows_read(self) -> tuple[int, int]:
        """Which rows have to be read: whole heads where the file interleaves a head's rows."""
        if not self.tensor.interleaved_heads:
            return self.first, self.last
        head_rows = self.tensor.shape[0] // self.tensor.interleaved_heads
        return self.first // head_rows * head_rows, -(-self.last // head_rows) * head_rows

    @property
    def bytes_read(self) -> int:
        """Bytes of `rows_read`."""
        first, last = self.rows_read
        return (last - first) * self.tensor.row_bytes

    @property
    def file_offset(self) -> int:
        """Where in the tensor's file `rows_read` begins."""
        assert self.tensor.place is not None
        return self.tensor.place.offset + self.rows_read[0] * self.tensor.row_bytes

    def in_order(self, content: Bytes) -> Bytes:
        """Return the span's rows from the content of `rows_read`."""
        if not self.tensor.interleaved_heads:
            return content
        first, last = self.rows_read
        num_heads = (last - first) * self.tensor.interleaved_heads // self.tensor.shape[0]
        rows = halves_in_order(content.reshape(last - first, -1), num_heads)
        content = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
        return content[(self.first - first) * self.tensor.row_bytes :][: self.num_bytes]


@dataclass(frozen=True, slots=True)
class Slab:
    """A run of panels: a matrix of the rows of `spans`, one above the other."""

    shape: MatrixShape
    panels: Bytes
    spans: tuple[RowSpan, ...]
    bias: Float32Array | None

    @property
    def disk_bytes(self) -> int:
        """Bytes of its rows on disk."""
        return sum(span.num_bytes for span in self.spans)


def cut(
    declared: DeclaredMatrix, shape: MatrixShape, panels: Bytes, slab_bytes: int
) -> Iterator[Slab]:
    """Yield the slabs that together fill `panels`, of about `slab_bytes` on disk each."""
    num_panels = shape.over(panels).num_panels
    panel_bytes = len(panels) // num_panels
    bias = np.concatenate([b.read_float32() for b in declared.biases]) if shape.has_bias else None
    # A gated matrix has the panel's gate rows in its first half, and its up rows in the second.
    num_groups = 2 if shape.gated else 1
    group_rows, panel_rows = shape.n // num_groups, PANEL_COLUMNS // num_groups
    step = max(1, slab_bytes * num_panels // max(1, declared.disk_bytes))
    for first in range(0, num_panels, step):
        last = min(first + step, num_panels)
        rows = (first * panel_rows, min(last * panel_rows, group_rows))
        groups = [(rows[0] + g * group_rows, rows[1] + g * group_rows) for g in range(num_groups)]
        n = num_groups * (rows[1] - rows[0])
        yield Slab(
            MatrixShape(shape.format, n, shape.k, shape.gated, shape.has_bias),
            panels[first * panel_bytes : last * panel_bytes],
            tuple(span for group in groups for span in _spans(declared.parts, *group)),
            None if bias is None else np.concatenate([bias[a:b] for a, b in groups]),
        )


def _spans(parts: tuple[MappedTensor, ...], first: int, last: int) -> Iterator[RowSpan]:
    """Yield where rows [first, last) of the parts, one above the other, lie."""
    start = 0
    for part in parts:
        stop = start + part.shape[0]
        if first < stop and last > start:
            yield RowSpan(part, max(first, start) - start, min(last, stop) - start)
        start = stop
