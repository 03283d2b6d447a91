"""Real text for prompts: paragraphs in a seeded order, none used twice before all are used.

Random token ids make speculation look good and prefix caches look bad, so prompts are text that
people wrote: by default the sources and language reference that every Python carries.
"""

from __future__ import annotations

import random
import re
import sysconfig
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

from twinfire.protocol.errors import TwinfireError

_MIN_PARAGRAPH_CHARS = 80
_MAX_PARAGRAPH_CHARS = 2000
_MAX_CORPUS_CHARS = 8_000_000
_BLANK_LINES = re.compile(r"\n\s*\n")


class TextTooSmall(TwinfireError):
    """There is no usable text; the message says where it was looked for."""


class PromptSource:
    """An endless supply of text. Two sources with one seed give the same text."""

    def __init__(self, paragraphs: Sequence[str], seed: int | str) -> None:
        if not paragraphs:
            raise TextTooSmall("the text for prompts has no paragraph")
        self._paragraphs = paragraphs
        self._seed = seed
        self._random = random.Random(seed)
        self._num_left = len(paragraphs)
        self._moved: dict[int, int] = {}

    def take(self, min_chars: int) -> str:
        """Return the next paragraphs, at least `min_chars` characters."""
        taken: list[str] = []
        num_chars = 0
        while num_chars < min_chars or not taken:
            paragraph = self._paragraphs[self._next_index()]
            taken.append(paragraph)
            num_chars += len(paragraph) + 2
        return "\n\n".join(taken)

    def _next_index(self) -> int:
        """Draw without replacement: a shuffle done only as far as it is used, for cheap forks."""
        if not self._num_left:
            self._num_left = len(self._paragraphs)
            self._moved.clear()
        place = self._random.randrange(self._num_left)
        self._num_left -= 1
        index = self._moved.get(place, place)
        self._moved[place] = self._moved.get(self._num_left, self._num_left)
        return index

    def fork(self, name: str) -> PromptSource:
        """Return an independent source over the same paragraphs; equal names give equal text."""
        return PromptSource(self._paragraphs, f"{self._seed}/{name}")


def library_paragraphs() -> tuple[str, ...]:
    """Return the paragraphs of Python's own reference and library; TextTooSmall without them."""
    folder = Path(sysconfig.get_path("stdlib"))
    sources = (_read(path) for path in sorted(folder.glob("*.py")))
    paragraphs = _paragraphs(chain(_language_reference(), sources))
    if not paragraphs:
        raise TextTooSmall(f"no library sources under {folder}: give a text with --text")
    return paragraphs


def paragraphs_of(path: Path) -> tuple[str, ...]:
    """Return the paragraphs of a text file, or of every file under a folder."""
    if not path.exists():
        raise TextTooSmall(f"--text {path}: there is no such file or folder")
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    paragraphs = _paragraphs(map(_read, files))
    if not paragraphs:
        raise TextTooSmall(
            f"--text {path}: no paragraph of at least {_MIN_PARAGRAPH_CHARS} characters"
        )
    return paragraphs


def _language_reference() -> Iterable[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # distributions may leave it out
        return ()
    return topics.values()


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="ignore")


def _paragraphs(texts: Iterable[str]) -> tuple[str, ...]:
    found: dict[str, None] = {}
    num_chars = 0
    for text in texts:
        for block in _BLANK_LINES.split(text):
            for start in range(0, len(block), _MAX_PARAGRAPH_CHARS):
                paragraph = block[start : start + _MAX_PARAGRAPH_CHARS].strip()
                if len(paragraph) >= _MIN_PARAGRAPH_CHARS:
                    found[paragraph] = None
                    num_chars += len(paragraph)
        if num_chars > _MAX_CORPUS_CHARS:
            break
    return tuple(found)
