"""Matrices from their files to panels: several large reads at a time, packed as they come.

Reading and packing share threads: while some wait for the disk, others pack what has come. Slabs
are taken in the order in which they lie in the files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from queue import SimpleQueue
from threading import Semaphore

import numpy as np
import numpy.typing as npt

from twinfire.artifacts.block_formats import to_float32
from twinfire.artifacts.file_reader import FileReader, window_bytes
from twinfire.artifacts.mapped_file import MappedFile
from twinfire.artifacts.tensors import MappedTensor
from twinfire.kernels.cpu._native import allocate_bytes, pack_panels
from twinfire.kernels.cpu.packed_file import MatrixShape
from twinfire.kernels.cpu.panel_memory import allocate_panels
from twinfire.kernels.cpu.slabs import Bytes, DeclaredMatrix, RowSpan, Slab, cut

SLAB_BYTES = 2 << 20
READS_AT_ONCE = 16
"""Disks that answer many requests at a time are only fast when they have many, also while some
threads pack."""

_PACKED_DIRECTLY = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1")


def load_panels(
    matrices: Sequence[tuple[DeclaredMatrix, MatrixShape]],
    tables: Sequence[MappedTensor],
    num_threads: int,
    on_bytes: Callable[[int], None],
) -> list[Bytes]:
    """Return the panels of each matrix, packed on at most `num_threads` threads at a time.

    The file pages of `tables`, whether matrices or not, get into the page cache; others may not.
    `on_bytes` is called on the caller's thread. ModelError when a file ends before its tensors.
    """
    panels = allocate_panels([shape.num_bytes for _, shape in matrices])
    slabs = [
        slab
        for (declared, shape), out in zip(matrices, panels, strict=True)
        for slab in cut(declared, shape, out, SLAB_BYTES)
    ]
    with ExitStack() as stack:
        readers: dict[MappedFile, FileReader] = {}
        for file in _files(matrices):
            readers[file] = stack.enter_context(closing(FileReader(file)))
        file_numbers = {file: number for number, file in enumerate(readers)}
        slabs.sort(key=lambda slab: _position(slab, file_numbers))
        kept_tensors = {table.name for table in tables}
        packer = _Packer(readers, kept_tensors, num_threads, max(map(_room_needed, slabs)))
        pool = ThreadPoolExecutor(packer.num_readers, thread_name_prefix="load")
        # Left by an exception, nothing that has not begun is begun.
        stack.callback(pool.shutdown, cancel_futures=True)
        packed_names = {part.name for declared, _ in matrices for part in declared.parts}
        for table in tables:
            if table.name not in packed_names:
                pool.submit(table.read_ahead)
        for slab, _ in zip(slabs, pool.map(packer.fill, slabs), strict=True):
            on_bytes(slab.disk_bytes)
    return panels


class _Packer:
    """Fills slabs, on any number of threads."""

    def __init__(
        self,
        readers: dict[MappedFile, FileReader],
        kept_tensors: Collection[str],
        num_threads: int,
        room_bytes: int,
    ) -> None:
        self.num_readers = max(READS_AT_ONCE, num_threads)
        self._readers = readers
        self._kept_tensors = kept_tensors
        self._may_pack = Semaphore(num_threads)
        self._rooms: SimpleQueue[Bytes] = SimpleQueue()
        for room in allocate_bytes(self.num_readers * room_bytes).reshape(-1, room_bytes):
            self._rooms.put(room)

    def fill(self, slab: Slab) -> None:
        """Read a slab's rows and pack them."""
        room = self._rooms.get()
        parts, used = [], 0
        for span in slab.spans:
            end = used + window_bytes(span.bytes_read)
            parts.append((span, self._read(span, room[used:end])))
            used = end
        with self._may_pack:
            sources = [_source(span, span.in_order(content)) for span, content in parts]
            matrix = slab.shape.over(slab.panels)
            pack_panels(matrix, slab.panels, sources, slab.bias, 0, matrix.num_panels)
        self._rooms.put(room)

    def _read(self, span: RowSpan, room: Bytes) -> Bytes:
        tensor = span.tensor
        if tensor.place is None:
            return _content(tensor.raw[span.first : span.last])
        is_kept = tensor.name in self._kept_tensors
        reader = self._readers[tensor.place.file]
        return reader.read(span.file_offset, span.bytes_read, room, keep_cached=is_kept)


def _files(matrices: Sequence[tuple[DeclaredMatrix, MatrixShape]]) -> list[MappedFile]:
    parts = [part for declared, _ in matrices for part in declared.parts]
    files = {part.place.file for part in parts if part.place is not None}
    return sorted(files, key=lambda file: file.path)


def _position(slab: Slab, file_numbers: dict[MappedFile, int]) -> tuple[int, int]:
    span = slab.spans[0]
    if span.tensor.place is None:
        return -1, 0
    return file_numbers[span.tensor.place.file], span.file_offset


def _room_needed(slab: Slab) -> int:
    return sum(window_bytes(span.bytes_read) for span in slab.spans)


def _source(span: RowSpan, content: Bytes) -> tuple[str, Bytes]:
    tensor = span.tensor
    if tensor.format in _PACKED_DIRECTLY:
        return tensor.format, content
    num_rows = span.last - span.first
    values = to_float32(tensor.format, content.reshape(num_rows, -1), (num_rows, tensor.shape[1]))
    return "f32", _content(values)


def _content(array: npt.NDArray[np.generic]) -> Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
