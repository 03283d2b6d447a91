"""A file mapped read-only into memory, and ranges of it. Knows no format."""

from __future__ import annotations

import mmap
import os
import weakref
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from twinfire.protocol.errors import ModelError


class MappedFile:
    """A whole file, mapped; its descriptor stays open, so that both are always the same file.

    ModelError naming it when that cannot be done. The mapping lives as long as any array over it,
    so nobody closes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.descriptor = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, self.descriptor)
            self.mapping = mmap.mmap(self.descriptor, 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise ModelError(f"{path} is missing") from None
        except ValueError:
            raise ModelError(f"{path} is empty") from None
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}") from None

    def forget_pages(self) -> None:
        """Let the pages go that were read; an array over them reads them again when it is used."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.mapping.madvise(mmap.MADV_DONTNEED)

    def read_into(self, offset: int, out: npt.NDArray[np.uint8]) -> None:
        """Fill `out` with the bytes from `offset` on; ModelError when the file ends before."""
        while len(out):
            try:
                num_read = os.preadv(self.descriptor, [out.data], offset)
            except OSError as error:
                raise ModelError(f"{self.path} cannot be read: {error.strerror}") from None
            if num_read == 0:
                raise ModelError(f"{self.path} was cut off at byte {offset} while it was read")
            offset, out = offset + num_read, out[num_read:]

    def read_ahead(self, offset: int, num_bytes: int) -> None:
        """Have the system read a range into its page cache; it need not be there on return."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.descriptor, offset, num_bytes, os.POSIX_FADV_WILLNEED)


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes [offset, offset + num_bytes) of a file."""

    file: MappedFile
    offset: int
    num_bytes: int

    def array(self, dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
        """Return a flat read-only array over the mapped bytes."""
        if self.num_bytes == 0:
            return np.empty(0, dtype)
        count = self.num_bytes // dtype.itemsize
        return np.frombuffer(self.file.mapping, dtype, count, self.offset)

    def copy(self) -> npt.NDArray[np.uint8]:
        """Return the bytes, read and not mapped: a page fault may read megabytes around it."""
        out = np.empty(self.num_bytes, np.uint8)
        self.file.read_into(self.offset, out)
        return out

    def read_ahead(self) -> None:
        """Have the system read the range into its page cache."""
        self.file.read_ahead(self.offset, self.num_bytes)
