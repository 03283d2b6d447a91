"""A file of packed matrices, each read once into the memory that the kernels use.

    magic, header length u64, sha256 of the header, header (JSON), then the panels of each matrix
    from the next multiple of 4096 on

The header has the file's length and a checksum of each matrix, so that a file that is cut off or
damaged is found before anything is computed with it. Numbers are in the order of this machine,
whose kernels alone read them.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, wait
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt

from twinfire.artifacts.file_reader import FileReader
from twinfire.artifacts.mapped_file import MappedFile
from twinfire.kernels.cpu._native import PackedMatrix
from twinfire.kernels.cpu.panel_memory import aligned

Bytes = npt.NDArray[np.uint8]
Sums = tuple[npt.NDArray[np.uint64], np.uint64]

MAGIC = b"TWFPACK1"
WRITE_BYTES = 4 << 20
READ_BYTES = 1 << 20
"""Large for a disk; small enough to be summed before it leaves the processor's cache."""
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
    """An open file, to be closed. DamagedFile or ModelError when there is none.

    Only `read` looks at the panels.
    """

    def __init__(self, path: Path) -> None:
        file = MappedFile(path)
        self._entries = _read_header(file.mapping).entries
        self._reader = FileReader(file)

    def close(self) -> None:
        """Let go of the file; what was read stays."""
        self._reader.close()

    @property
    def shapes(self) -> list[MatrixShape]:
        """Of every matrix."""
        return [entry.shape for entry in self._entries]

    def read(self, panels: Sequence[Bytes], pool: Executor) -> None:
        """Fill the panels of every matrix; DamagedFile unless they are those that were written.

        ModelError when they cannot be read.
        """
        offsets, pieces = [], []
        for entry, out in zip(self._entries, panels, strict=True):
            starts = range(0, len(out), READ_BYTES)
            offsets += [entry.offset + start for start in starts]
            pieces += [out[start : start + READ_BYTES] for start in starts]
        reads = [pool.submit(self._read_piece, *read) for read in zip(offsets, pieces, strict=True)]
        # All of them, so that none is under way when the file is closed.
        wait(reads)
        sums = (read.result() for read in reads)
        for index, (entry, out) in enumerate(zip(self._entries, panels, strict=True)):
            if _digest(islice(sums, -(-len(out) // READ_BYTES))) != entry.checksum:
                raise DamagedFile(f"matrix {index} has changed")

    def _read_piece(self, offset: int, out: Bytes) -> Sums:
        self._reader.read_into(offset, out)
        return _sums(out)


def _encoded_header(matrices: Sequence[tuple[MatrixShape, Bytes]]) -> bytes:
    checksums = [_digest([_sums(panels)]) for _, panels in matrices]
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


def _read_header(mapping: mmap.mmap) -> _Header:
    num_bytes = len(mapping)
    prefix = mapping[:_PREFIX_BYTES]
    if len(prefix) < _PREFIX_BYTES:
        raise DamagedFile("it is too short")
    if prefix[: len(MAGIC)] != MAGIC:
        raise DamagedFile("it begins otherwise")
    length = int.from_bytes(prefix[len(MAGIC) : len(MAGIC) + _LENGTH_BYTES], "little")
    if length > min(_MAX_HEADER_BYTES, num_bytes):
        raise DamagedFile("its header is cut off")
    content = mapping[_PREFIX_BYTES : _PREFIX_BYTES + length]
    if sha256(content).digest() != prefix[-_DIGEST_BYTES:]:
        raise DamagedFile("its header has changed")
    header = msgspec.json.decode(content, type=_Header)
    if header.file_bytes != num_bytes:
        raise DamagedFile(f"it has {num_bytes} bytes of {header.file_bytes}")
    return header


def _sums(content: Bytes) -> Sums:
    """Return the sums of each whole 64 KiB, and of the rest: memory speed, and damage shows."""
    words = content.view(np.uint64)
    num_whole = len(words) // _WORDS_PER_SUM * _WORDS_PER_SUM
    sums = words[:num_whole].reshape(-1, _WORDS_PER_SUM).sum(axis=1, dtype=np.uint64)
    return sums, words[num_whole:].sum(dtype=np.uint64)


def _digest(pieces: Iterable[Sums]) -> str:
    """Return the checksum of pieces, all but the last of which are whole multiples of 64 KiB."""
    digest, end = sha256(), b""
    for sums, rest in pieces:
        digest.update(sums.tobytes())
        end = rest.tobytes()
    digest.update(end)
    return digest.hexdigest()
