"""A file mapped read-only into memory. Knows no format."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt

from twinfire.protocol.errors import ModelError


def map_file(path: Path) -> mmap.mmap:
    """Map a whole file; ModelError naming it when that cannot be done.

    The mapping lives as long as any array over it, so nobody closes it.
    """
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelError(f"{path} is missing") from None
    except ValueError:
        raise ModelError(f"{path} is empty") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None


def forget_pages(mapping: mmap.mmap) -> None:
    """Let the pages go that were read; an array over them reads them again when it is used."""
    if hasattr(mmap, "MADV_DONTNEED"):
        mapping.madvise(mmap.MADV_DONTNEED)


def mapped_array(
    mapping: mmap.mmap, offset: int, size_bytes: int, dtype: np.dtype[np.generic]
) -> npt.NDArray[np.generic]:
    """Return a flat read-only array over [offset, offset + size_bytes) of the mapping."""
    if size_bytes == 0:
        return np.empty(0, dtype)
    return np.frombuffer(mapping, dtype, size_bytes // dtype.itemsize, offset)
