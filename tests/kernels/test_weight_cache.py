"""Packed weights on disk: the same bits as packed anew, and no fault of a disk stops a start."""

from __future__ import annotations

import logging
import os
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from twinfire.artifacts.content_key import HEAD_BYTES, content_key
from twinfire.kernels.cpu._native import allocate_bytes
from twinfire.kernels.cpu.packed_file import Bytes, MatrixShape
from twinfire.kernels.cpu.panel_memory import ALIGNMENT
from twinfire.kernels.cpu.weight_cache import (
    ABANDONED_AFTER_S,
    SUFFIX,
    WORK_SUFFIX,
    WeightCache,
)
from twinfire.protocol.errors import ModelError

NO_LIMIT = 1 << 40
SHAPES = [
    MatrixShape("bf16", 65, 33, False, True),
    MatrixShape("q4_1", 128, 64, True, False),
    MatrixShape("int8", 7, 96, False, False),
]
SOURCES = "a|b|c"
POOL = ThreadPoolExecutor(2)


def matrices(seed: int = 0) -> list[tuple[MatrixShape, Bytes]]:
    rng = np.random.default_rng(seed)
    made = []
    for shape in SHAPES:
        panels = allocate_bytes(shape.num_bytes)
        panels[:] = rng.integers(0, 256, len(panels), np.uint8)
        made.append((shape, panels))
    return made


def cache_in(folder: Path, content: str = "content", max_bytes: int = NO_LIMIT) -> WeightCache:
    return WeightCache(folder, max_bytes, content)


def loaded(cache: WeightCache) -> list[bytes] | None:
    found = cache.load(SHAPES, SOURCES, POOL)
    return found and [panels.tobytes() for panels in found]


def contents(seed: int = 0) -> list[bytes]:
    return [panels.tobytes() for _, panels in matrices(seed)]


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_what_was_saved_is_read(tmp_path: Path) -> None:
    cache = cache_in(tmp_path / "new" / "folder")
    assert loaded(cache) is None
    assert cache.save(matrices(), SOURCES)
    assert loaded(cache) == contents()
    for shape, panels in zip(SHAPES, cache.load(SHAPES, SOURCES, POOL) or [], strict=True):
        assert panels.ctypes.data % ALIGNMENT == 0
        assert shape.over(panels).num_bytes == shape.num_bytes


def test_other_content_sources_or_shapes_find_nothing(tmp_path: Path) -> None:
    cache_in(tmp_path).save(matrices(), SOURCES)
    assert loaded(cache_in(tmp_path, "other content")) is None
    assert cache_in(tmp_path).load(SHAPES, "a|b|d", POOL) is None
    assert cache_in(tmp_path).load(SHAPES[:2], SOURCES, POOL) is None


def test_another_kernel_finds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_in(tmp_path).save(matrices(), SOURCES)
    monkeypatch.setattr("twinfire.kernels.cpu.weight_cache.kernel_version", "another")
    assert loaded(cache_in(tmp_path)) is None


def damage_positions() -> list[tuple[str, float]]:
    return [("magic", 0.0), ("header", 0.005), ("first panel", 0.4), ("last byte", 1.0)]


@pytest.mark.parametrize(("name", "place"), damage_positions())
def test_one_changed_bit_anywhere_is_found_and_the_file_rewritten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, place: float
) -> None:
    cache = cache_in(tmp_path)
    cache.save(matrices(), SOURCES)
    path = only_file(tmp_path)
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 1
    path.write_bytes(content)
    assert loaded(cache) is None
    assert "is not used" in caplog.text
    assert cache.save(matrices(), SOURCES)
    assert loaded(cache) == contents()


@pytest.mark.parametrize("kept", [0, 7, 48, 300, -1])
def test_a_torn_file_is_not_used(tmp_path: Path, kept: int) -> None:
    cache = cache_in(tmp_path)
    cache.save(matrices(), SOURCES)
    path = only_file(tmp_path)
    path.write_bytes(path.read_bytes()[:kept])
    assert loaded(cache) is None
    assert not path.exists()


def test_a_page_of_zeros_is_found(tmp_path: Path) -> None:
    cache = cache_in(tmp_path)
    cache.save(matrices(), SOURCES)
    path = only_file(tmp_path)
    with path.open("r+b") as file:
        file.seek(-ALIGNMENT, os.SEEK_END)
        file.write(bytes(ALIGNMENT))
    assert loaded(cache) is None


@pytest.mark.parametrize("folder", ["/proc/twinfire", "{file}/below"])
def test_a_folder_that_cannot_be_written_is_only_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, folder: str
) -> None:
    file = tmp_path / "file"
    file.touch()
    cache = cache_in(Path(folder.format(file=file)))
    assert loaded(cache) is None
    assert not cache.save(matrices(), SOURCES)
    assert [record.levelno for record in caplog.records][-1] == logging.WARNING


def test_a_disk_that_fills_up_leaves_nothing_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = cache_in(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        assert not cache.save(matrices(), SOURCES)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "not kept" in caplog.text
    assert list(tmp_path.iterdir()) == []
    assert cache.save(matrices(), SOURCES)


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    cache_in(tmp_path, "a").save(matrices(), SOURCES)
    limit = only_file(tmp_path).stat().st_size * 5 // 2
    cache_in(tmp_path, "b", limit).save(matrices(), SOURCES)
    # The system's clock for files ticks too slowly to order two uses in a row.
    for path in tmp_path.iterdir():
        os.utime(path, (time.time() - 1000,) * 2)
    assert loaded(cache_in(tmp_path, "a", limit))
    assert cache_in(tmp_path, "c", limit).save(matrices(1), SOURCES)
    assert len(list(tmp_path.iterdir())) == 2
    assert loaded(cache_in(tmp_path, "b", limit)) is None
    assert loaded(cache_in(tmp_path, "a", limit)) == contents()
    assert loaded(cache_in(tmp_path, "c", limit)) == contents(1)


def test_a_model_beyond_the_limit_is_not_kept(tmp_path: Path) -> None:
    cache_in(tmp_path, "a").save(matrices(), SOURCES)
    assert not cache_in(tmp_path, "b", 1000).save(matrices(), SOURCES)
    assert loaded(cache_in(tmp_path, "a")) == contents()


def test_files_of_writers_that_ended_are_removed(tmp_path: Path) -> None:
    old, young = tmp_path / f"old{WORK_SUFFIX}", tmp_path / f"young{WORK_SUFFIX}"
    old.touch()
    young.touch()
    os.utime(old, (time.time() - ABANDONED_AFTER_S - 10,) * 2)
    cache_in(tmp_path).save(matrices(), SOURCES)
    assert not old.exists()
    assert young.exists()


WRITER = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from test_weight_cache import SOURCES, cache_in, contents, loaded, matrices
cache = cache_in(Path({folder!r}))
made = matrices()
print("ready", flush=True)
sys.stdin.readline()
for _ in range(20):
    assert cache.save(made, SOURCES)
    assert loaded(cache) == contents()
"""


def test_two_processes_that_write_at_once_leave_one_good_file(tmp_path: Path) -> None:
    script = WRITER.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate(timeout=60)
        assert writer.returncode == 0
    assert only_file(tmp_path).suffix == SUFFIX
    assert loaded(cache_in(tmp_path)) == contents()


def test_a_content_key_follows_what_the_files_hold(tmp_path: Path) -> None:
    path, copy = tmp_path / "a", tmp_path / "b"
    content = bytearray(np.random.default_rng(0).bytes(HEAD_BYTES + 500_000))
    path.write_bytes(content)
    copy.write_bytes(content)
    os.utime(copy, ns=(path.stat().st_mtime_ns,) * 2)
    key = content_key([path])
    assert content_key([copy]) == key
    # Other weights of the same size and time.
    for start, stop in ((10, 11), (HEAD_BYTES + 1000, HEAD_BYTES + 9000)):
        changed = content.copy()
        changed[start:stop] = bytes(b ^ 1 for b in changed[start:stop])
        copy.write_bytes(changed)
        os.utime(copy, ns=(path.stat().st_mtime_ns,) * 2)
        assert content_key([copy]) != key
    os.utime(path, (1, 1))
    assert content_key([path]) != key
    with pytest.raises(ModelError, match="missing"):
        content_key([tmp_path / "missing"])
