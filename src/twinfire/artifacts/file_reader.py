"""Large reads of one file: out of the page cache where it holds them, past it where it does not.

A cold read through the page cache costs a processor more than the disk takes on fast disks: every
page is allocated, filed and copied. Direct reads leave the processors to whoever uses the bytes,
but they always go to the disk. Which of the two a range gets was decided by what the cache held
when the reader was made; either gives the same bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

import numpy as np
import numpy.typing as npt

from twinfire.artifacts.mapped_file import MappedFile

ALIGNMENT = 4096
"""Of offset, length and memory in a direct read; disks want 512 or 4096."""

Bytes = npt.NDArray[np.uint8]


def window_bytes(num_bytes: int) -> int:
    """Return the room that reading a range of `num_bytes` anywhere in a file may need."""
    return (num_bytes + 2 * ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


class FileReader:
    """Reads a file from any number of threads; to be closed."""

    def __init__(self, file: MappedFile) -> None:
        self._file = file
        self._direct = _open_direct(file)
        self._is_cached = None if self._direct is None else _cached_pages(file.mapping)

    def close(self) -> None:
        """Give the descriptor back; no read may follow."""
        if self._direct is not None:
            os.close(self._direct)

    def read(self, offset: int, num_bytes: int, room: Bytes, *, keep_cached: bool) -> Bytes:
        """Return bytes [offset, offset + num_bytes), read into `room`.

        `room` starts at a multiple of ALIGNMENT and has at least `window_bytes(num_bytes)`. With
        `keep_cached` the bytes are in the page cache afterwards. ModelError when the file ends
        before.
        """
        start = offset // ALIGNMENT * ALIGNMENT
        if not keep_cached and not self._holds(offset, num_bytes):
            stop = -(-(offset + num_bytes) // ALIGNMENT) * ALIGNMENT
            if self._read_direct(start, room[: stop - start]) >= offset + num_bytes - start:
                return room[offset - start :][:num_bytes]
        out = room[:num_bytes]
        self._file.read_into(offset, out)
        return out

    def read_into(self, offset: int, out: Bytes) -> None:
        """Fill `out` with the bytes from `offset` on; ModelError when the file ends before.

        What is not aligned to ALIGNMENT, in the file or in memory, goes through the page cache.
        """
        num_whole = len(out) // ALIGNMENT * ALIGNMENT
        is_aligned = offset % ALIGNMENT == 0 and out.ctypes.data % ALIGNMENT == 0
        if is_aligned and num_whole and not self._holds(offset, num_whole):
            num_read = self._read_direct(offset, out[:num_whole])
            offset, out = offset + num_read, out[num_read:]
        self._file.read_into(offset, out)

    def _holds(self, offset: int, num_bytes: int) -> bool:
        if self._is_cached is None:
            return True
        last = offset + max(num_bytes, 1) - 1
        pages = self._is_cached[offset // mmap.PAGESIZE : last // mmap.PAGESIZE + 1]
        return bool(pages.all())

    def _read_direct(self, offset: int, out: Bytes) -> int:
        """Return how many bytes were read in one go, 0 where that is not possible."""
        assert self._direct is not None
        try:
            return os.preadv(self._direct, [out.data], offset)
        except OSError:
            return 0


def _open_direct(file: MappedFile) -> int | None:
    flag = getattr(os, "O_DIRECT", None)
    if flag is None:
        return None
    # Through the descriptor and not the path, which may lead to another file by now.
    with contextlib.suppress(OSError):
        return os.open(f"/proc/self/fd/{file.descriptor}", os.O_RDONLY | flag)
    return None


def _cached_pages(mapping: mmap.mmap) -> npt.NDArray[np.bool_] | None:
    """Return which pages the page cache holds, None where the system does not tell."""
    pages = np.empty(-(-len(mapping) // mmap.PAGESIZE), np.uint8)
    start = np.frombuffer(mapping, np.uint8).ctypes.data
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    if mincore(start, len(mapping), pages.ctypes.data) != 0:
        return None
    return (pages & 1).astype(np.bool_)
