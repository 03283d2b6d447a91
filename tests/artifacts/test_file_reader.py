"""Large reads past and out of the page cache give a file's bytes, or say that it was cut off."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinfire.artifacts.file_reader import ALIGNMENT, Bytes, FileReader, window_bytes
from twinfire.artifacts.mapped_file import FileRange, MappedFile
from twinfire.protocol.errors import ModelError

FILE_BYTES = 5 * ALIGNMENT + 77
CONTENT = np.random.default_rng(0).integers(0, 256, FILE_BYTES, dtype=np.uint8)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> MappedFile:
    path = tmp_path_factory.mktemp("files") / "weights"
    path.write_bytes(CONTENT.tobytes())
    return MappedFile(path)


def drop_from_page_cache(file: MappedFile) -> None:
    os.fsync(file.descriptor)
    os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def aligned_room(num_bytes: int) -> Bytes:
    memory = np.zeros(num_bytes + ALIGNMENT, np.uint8)
    return memory[-memory.ctypes.data % ALIGNMENT :][:num_bytes]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), keep_cached=st.booleans(), cold=st.booleans())
def test_any_range_is_read(
    file: MappedFile, data: st.DataObject, keep_cached: bool, cold: bool
) -> None:
    start = data.draw(st.integers(0, FILE_BYTES))
    stop = data.draw(st.integers(start, FILE_BYTES))
    if cold:
        drop_from_page_cache(file)
    with closing(FileReader(file)) as reader:
        room = aligned_room(window_bytes(stop - start))
        read = reader.read(start, stop - start, room, keep_cached=keep_cached)
    np.testing.assert_array_equal(read, CONTENT[start:stop])
    np.testing.assert_array_equal(FileRange(file, start, stop - start).copy(), CONTENT[start:stop])


@settings(max_examples=60, deadline=None)
@given(
    page=st.integers(0, 5),
    shift=st.sampled_from([0, 0, 3]),
    memory_shift=st.sampled_from([0, 0, 8]),
    num_bytes=st.integers(0, 3 * ALIGNMENT),
    cold=st.booleans(),
)
def test_memory_is_filled_however_it_is_aligned(
    file: MappedFile, page: int, shift: int, memory_shift: int, num_bytes: int, cold: bool
) -> None:
    start = page * ALIGNMENT + shift
    num_bytes = min(num_bytes, FILE_BYTES - start)
    room = aligned_room(4 * ALIGNMENT)
    if cold:
        drop_from_page_cache(file)
    with closing(FileReader(file)) as reader:
        reader.read_into(start, room[memory_shift : memory_shift + num_bytes])
    expected = np.zeros_like(room)
    expected[memory_shift : memory_shift + num_bytes] = CONTENT[start : start + num_bytes]
    np.testing.assert_array_equal(room, expected)


@pytest.mark.parametrize("keep_cached", [False, True])
def test_a_file_that_loses_its_end_is_found(tmp_path: Path, keep_cached: bool) -> None:
    path = tmp_path / "weights"
    path.write_bytes(CONTENT.tobytes())
    file = MappedFile(path)
    drop_from_page_cache(file)
    with closing(FileReader(file)) as reader:
        os.truncate(path, 3 * ALIGNMENT)
        room = aligned_room(window_bytes(FILE_BYTES))
        with pytest.raises(ModelError, match=f"cut off at byte {3 * ALIGNMENT}"):
            reader.read(100, FILE_BYTES - 100, room, keep_cached=keep_cached)


def test_the_file_that_was_opened_is_read_whatever_has_its_name_now(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(CONTENT.tobytes())
    file = MappedFile(path)
    drop_from_page_cache(file)
    (tmp_path / "other").write_bytes(bytes(FILE_BYTES))
    os.replace(tmp_path / "other", path)
    with closing(FileReader(file)) as reader:
        room = aligned_room(window_bytes(FILE_BYTES))
        read = reader.read(0, FILE_BYTES, room, keep_cached=False)
    np.testing.assert_array_equal(read, CONTENT)


def test_descriptors_are_given_back(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(CONTENT.tobytes())
    before = len(os.listdir("/proc/self/fd"))
    file = MappedFile(tmp_path / "weights")
    FileReader(file).close()
    del file
    assert len(os.listdir("/proc/self/fd")) == before
