from __future__ import annotations

from pathlib import Path

import pytest

from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.key_file import MAX_KEY_BYTES, load_key


def test_a_key_is_read_without_white_space_around_it(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("\n sk-abc~! \r\n")
    assert load_key(tmp_path / "key", "the key") == "sk-abc~!"


@pytest.mark.parametrize("content", ["", " \n", "two words", "zwei\nzeilen", "schlüssel", "a\x00b"])
def test_what_is_no_key_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "key").write_text(content)
    with pytest.raises(InvalidRequest, match=r"the engines' key .* must be one word"):
        load_key(tmp_path / "key", "the engines' key")


def test_a_file_that_is_missing_or_too_long_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"cannot read the key .*nowhere: No such file"):
        load_key(tmp_path / "nowhere", "the key")
    (tmp_path / "key").write_text("k" * (MAX_KEY_BYTES + 1))
    with pytest.raises(InvalidRequest, match="longer than 4096 bytes"):
        load_key(tmp_path / "key", "the key")
