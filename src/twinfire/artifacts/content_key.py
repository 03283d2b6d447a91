"""What weight files hold, told apart without reading all of them.

A key covers each file's size, time of change, its first megabytes (where headers are) and samples
spread over the rest. So other weights under the same name, size and time are noticed, since
training changes every tensor; an edit by hand that keeps size and time and misses all samples is
not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path

from twinfire.protocol.errors import ModelError

HEAD_BYTES = 4 << 20
SAMPLE_BYTES = 4096
SAMPLES_PER_FILE = 64


def content_key(paths: Iterable[Path]) -> str:
    """Return the key of files in this order, whatever they are called; ModelError names one that
    cannot be read.
    """
    digest = sha256()
    for path in paths:
        try:
            with path.open("rb") as file:
                _add(digest.update, file.fileno())
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    return digest.hexdigest()


def _add(update: Callable[[bytes], None], descriptor: int) -> None:
    status = os.fstat(descriptor)
    update(f"{status.st_size} {status.st_mtime_ns};".encode())
    update(os.pread(descriptor, HEAD_BYTES, 0))
    step = max(SAMPLE_BYTES, (status.st_size - HEAD_BYTES) // SAMPLES_PER_FILE)
    for offset in range(HEAD_BYTES, status.st_size, step):
        update(os.pread(descriptor, SAMPLE_BYTES, offset))
