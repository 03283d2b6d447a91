"""Packed weights of earlier starts, as files in the user's cache folder.

A file's name is a digest of everything that its bytes follow from, so a file is right or is not
found. Files appear whole, under a name of their own until they are on disk, and are only ever
replaced or removed, never changed: others may be reading them. Whatever goes wrong here costs
time, never a start: it is logged and the weights are packed anew.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from hashlib import sha256
from pathlib import Path

from twinfire.kernels.cpu._native import isa, kernel_version
from twinfire.kernels.cpu.packed_file import (
    Bytes,
    DamagedFile,
    MatrixShape,
    PackedFile,
    packed_file_bytes,
    write_packed,
)
from twinfire.kernels.cpu.panel_memory import allocate_panels
from twinfire.protocol.errors import ModelError

SUFFIX = ".packed"
WORK_SUFFIX = ".writing"
ABANDONED_AFTER_S = 3600.0
"""A file that is still being written after this long belongs to a process that ended."""
FREE_BYTES_LEFT = 1 << 30
"""What a disk keeps free."""

log = logging.getLogger(__name__)


class WeightCache:
    """The files for one model's weight files. `content_key` says what those hold."""

    def __init__(self, folder: Path, max_bytes: int, content_key: str) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._content_key = content_key

    def load(
        self, shapes: Sequence[MatrixShape], sources: str, pool: Executor
    ) -> list[Bytes] | None:
        """Return the panels of such matrices made from `sources`, None when there is no good file.

        Every byte has been checked.
        """
        path = self._path(shapes, sources)
        if not path.exists():
            return None
        try:
            with contextlib.closing(PackedFile(path)) as file:
                if file.shapes != list(shapes):
                    raise DamagedFile("it holds other matrices")
                panels = allocate_panels([shape.num_bytes for shape in shapes])
                file.read(panels, pool)
        except (ModelError, DamagedFile) as error:
            log.warning("%s is not used: %s", path, error)
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # What was used last is removed last.
        return panels

    def save(
        self,
        matrices: Sequence[tuple[MatrixShape, Bytes]],
        sources: str,
        after_write: Callable[[], None] = lambda: None,
    ) -> bool:
        """Write a file, calling `after_write` every few megabytes; return whether that worked."""
        shapes = [shape for shape, _ in matrices]
        path = self._path(shapes, sources)
        num_bytes = packed_file_bytes(shapes)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._remove_abandoned()
            if num_bytes > self._max_bytes:
                log.warning("packed weights of %d bytes are beyond the cache's limit", num_bytes)
                return False
            self._make_room(num_bytes, path)
            if shutil.disk_usage(self._folder).free < num_bytes + FREE_BYTES_LEFT:
                log.warning("packed weights are not kept: too little space in %s", self._folder)
                return False
            self._write(path, matrices, after_write)
        except OSError as error:
            log.warning("packed weights are not kept in %s: %s", self._folder, error)
            return False
        return True

    def _write(
        self,
        path: Path,
        matrices: Sequence[tuple[MatrixShape, Bytes]],
        after_write: Callable[[], None],
    ) -> None:
        descriptor, name = tempfile.mkstemp(WORK_SUFFIX, path.stem[:8] + "-", self._folder)
        try:
            with open(descriptor, "wb") as file:
                write_packed(file, matrices, after_write)
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise

    def _make_room(self, num_bytes: int, path: Path) -> None:
        """Remove what was used longest ago until `num_bytes` more fit."""
        files = []
        for other in self._folder.glob(f"*{SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                status = other.stat()
                files.append((status.st_mtime_ns, status.st_size, other))
        total = sum(size for _, size, other in files if other != path)
        for _, size, other in sorted(files):
            if total + num_bytes <= self._max_bytes:
                return
            if other != path:
                other.unlink(missing_ok=True)
                total -= size

    def _remove_abandoned(self) -> None:
        for path in self._folder.glob(f"*{WORK_SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > ABANDONED_AFTER_S:
                    path.unlink()

    def _path(self, shapes: Sequence[MatrixShape], sources: str) -> Path:
        """A panel's bytes follow from its source's, its shape, and the code that packs."""
        parts = (self._content_key, kernel_version, isa(), repr(list(shapes)), sources)
        return self._folder / f"{sha256(chr(0).join(parts).encode()).hexdigest()}{SUFFIX}"
