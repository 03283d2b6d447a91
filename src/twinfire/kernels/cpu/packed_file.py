"""A file of packed matrices, each read once into the memory that the kernels use.

    magic, header length u64, sha256 of the header, header (JSON), then the panels of each matrix
    from the next multiple of 4096 on

The header has the file's length and a checksum of each matrix, so that a file that is cut off or
damaged is found before anything is computed with it. Numbers are in the order of this machine,
whose kernels alone read them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from io import RawIOBase
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt

from twinfire.kernels.cpu._native import PackedMatrix
from twinfire.kernels.cpu.panel_memory import aligned

Bytes = npt.NDArray[np.uint8]

MAGIC = b"TWFPACK1"
WRITE_BYTES = 4 << 20
READ_BYTES = 1 << 19
"""Still in the second-level cache when it is summed."""
_LENGTH_BYTES = 8
_DIGEST_BYTES = 32
_PREFIX_BYTES = len(MAGIC) + _LENGTH_BYTES + _DIGEST_BYTES
_MAX_HEADER_BYTES = 64 << 20
_WORDS_PER_SUM = 8192


class DamagedFile(Exception):
    """Not a file that `write_packed` has finished; the message says what is wrong."""


class MatrixShape(msgspec.Struct, frozen=True, array_like=True):
    """What a `PackedMatrix` is made of, but for its panels."""

    format: str
    n: int
    k: int
    gated: bool
    has_bias: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of its panels."""
        return PackedMatrix.num_bytes_of(self.format, self.n, self.k, self.gated, self.has_bias)

    def over(self, panels: Bytes) -> PackedMatrix:
        """Return the matrix whose panels these are."""
        return PackedMatrix(self.format, self.n, self.k, self.gated, self.has_bias, panels)


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    shape: MatrixShape
    offset: int
    checksum: str


class _Header(msgspec.Struct, frozen=True):
    file_bytes: int
    entries: list[_Entry]


def packed_file_bytes(shapes: Iterable[MatrixShape]) -> int:
    """Return about what a file of such matrices takes."""
    return sum(aligned(shape.num_bytes) for shape in shapes)


def write_packed(
    file: BinaryIO,
    matrices: Sequence[tuple[MatrixShape, Bytes]],
    after_write: Callable[[], None],
) -> None:
    """Write a whole file, calling `after_write` every few megabytes; OSError when it cannot."""
    header = _encoded_header(matrices)
    file.write(MAGIC + len(header).to_bytes(_LENGTH_BYTES, "little") + sha256(header).digest())
    file.write(header)
    for _, panels in matrices:
        file.seek(aligned(file.tell()))
        for start in range(0, len(panels), WRITE_BYTES):
            file.write(panels[start : start + WRITE_BYTES].data)
            after_write()
    file.flush()


class PackedFile:
    """An open file, to be closed. DamagedFile or OSError when there is none.

    Only `read` looks at the panels.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)
        try:
            self._entries = _read_header(self._file).entries
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Let go of the file; what was read stays."""
        self._file.close()

    @property
    def shapes(self) -> list[MatrixShape]:
        """Of every matrix."""
        return [entry.shape for entry in self._entries]

    def read(self, index: int, panels: Bytes) -> None:
        """Read the panels of a matrix; DamagedFile unless they are those that were written.

        Threads may read at once.
        """
        entry = self._entries[index]
        if _checksum(self._pieces(entry.offset, panels)) != entry.checksum:
            raise DamagedFile(f"matrix {index} has changed")

    def _pieces(self, offset: int, panels: Bytes) -> Iterator[Bytes]:
        for start in range(0, len(panels), READ_BYTES):
            piece = panels[start : start + READ_BYTES]
            if os.preadv(self._file.fileno(), [piece.data], offset + start) != len(piece):
                raise DamagedFile("it is cut off")
            yield piece


def _encoded_header(matrices: Sequence[tuple[MatrixShape, Bytes]]) -> bytes:
    checksums = [_checksum([panels]) for _, panels in matrices]
    shapes = [shape for shape, _ in matrices]
    # Offsets are numbers in the header, so its length depends on them: room is left for the widest.
    widest = [_Entry(s, 1 << 62, c) for s, c in zip(shapes, checksums, strict=True)]
    offset = aligned(_PREFIX_BYTES + len(msgspec.json.encode(_Header(1 << 62, widest))))
    entries, end = [], offset
    for shape, checksum in zip(shapes, checksums, strict=True):
        entries.append(_Entry(shape, offset, checksum))
        end = offset + shape.num_bytes
        offset = aligned(end)
    header = msgspec.json.encode(_Header(end, entries))
    return header.ljust(entries[0].offset - _PREFIX_BYTES)


def _read_header(file: RawIOBase) -> _Header:
    num_bytes = os.fstat(file.fileno()).st_size
    prefix = os.pread(file.fileno(), _PREFIX_BYTES, 0)
    if len(prefix) < _PREFIX_BYTES:
        raise DamagedFile("it is too short")
    if prefix[: len(MAGIC)] != MAGIC:
        raise DamagedFile("it begins otherwise")
    length = int.from_bytes(prefix[len(MAGIC) : len(MAGIC) + _LENGTH_BYTES], "little")
    if length > min(_MAX_HEADER_BYTES, num_bytes):
        raise DamagedFile("its header is cut off")
    content = os.pread(file.fileno(), length, _PREFIX_BYTES)
    if sha256(content).digest() != prefix[-_DIGEST_BYTES:]:
        raise DamagedFile("its header has changed")
    header = msgspec.json.decode(content, type=_Header)
    if header.file_bytes != num_bytes:
        raise DamagedFile(f"it has {num_bytes} bytes of {header.file_bytes}")
    return header


def _checksum(pieces: Iterable[Bytes]) -> str:
    """Sums of 64 KiB each, digested together: as fast as memory, and damage shows in a sum.

    All pieces but the last are whole multiples of 64 KiB.
    """
    digest, rest = sha256(), np.uint64(0)
    for piece in pieces:
        words = piece.view(np.uint64)
        num_whole = len(words) // _WORDS_PER_SUM * _WORDS_PER_SUM
        sums = words[:num_whole].reshape(-1, _WORDS_PER_SUM).sum(axis=1, dtype=np.uint64)
        digest.update(sums.tobytes())
        rest = words[num_whole:].sum(dtype=np.uint64)
    digest.update(rest.tobytes())
    return digest.hexdigest()
