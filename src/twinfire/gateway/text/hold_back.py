"""Reading a text that is still growing, so that the result does not depend on where it was cut.

Readers are generators that yield wherever more text is needed. Text is passed on as soon as it is
certain that it is no part of a marker, no later; nothing here loses or repeats a character.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Work that yields when it needs more text, and returns its result."""
Emit = Callable[[str], None]

_SPACE = re.compile(r"\s*")
_OUTSIDE_STRING = re.compile(r'[^"{}\[\]]*')
_INSIDE_STRING = re.compile(r'[^"\\]*')
_SCALAR = re.compile(r'[^\s,\[\]{}"]*')
_CLOSING = {"{": "}", "[": "]"}


class Markers:
    """Texts to be found; none may be the beginning of another."""

    __slots__ = ("_first", "_longest", "_pattern", "texts")

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self._pattern = re.compile("|".join(map(re.escape, texts)))
        self._first = re.compile("[" + "".join(re.escape(text[0]) for text in texts) + "]")
        self._longest = max(map(len, texts))

    def find(self, text: str, start: int) -> tuple[int, str] | None:
        """Return the position and the text of the first marker from `start` on."""
        match = self._pattern.search(text, start)
        return None if match is None else (match.start(), match.group())

    def partial(self, text: str, start: int) -> int:
        """Return where a marker may have begun that is not complete; the end if nowhere."""
        tail = max(start, len(text) - self._longest + 1)
        for match in self._first.finditer(text, tail):
            begun = text[match.start() :]
            if any(marker.startswith(begun) for marker in self.texts):
                return match.start()
        return len(text)


class GrowingText:
    """What has come and is not read yet. Belongs to one reader."""

    __slots__ = ("_kept_from", "_position", "_text", "_text_start", "ended")

    def __init__(self) -> None:
        self.ended = False
        """Nothing more will come."""
        self._text = ""
        self._position = 0
        self._kept_from: int | None = None
        self._text_start = 0
        """Place of `_text` in all text."""

    @property
    def position(self) -> int:
        """How many characters have been read."""
        return self._text_start + self._position

    def feed(self, text: str) -> None:
        """Add what came."""
        done = self._position if self._kept_from is None else self._kept_from
        if done:
            self._text = self._text[done:] + text
            self._text_start += done
            self._position -= done
            if self._kept_from is not None:
                self._kept_from = 0
        else:
            self._text += text

    def keep(self) -> None:
        """Remember what is read from here on."""
        self._kept_from = self._position

    def kept(self) -> str:
        """Return what was read since `keep`, and remember no longer."""
        assert self._kept_from is not None, "nothing was kept"
        kept = self._text[self._kept_from : self._position]
        self._kept_from = None
        return kept

    def forget(self) -> None:
        """Remember no longer."""
        self._kept_from = None

    def unread(self, text: str) -> None:
        """Give back what was read last, so that it is read again."""
        self._position -= len(text)

    def until(self, markers: Markers, emit: Emit) -> Steps[str]:
        """Pass on text up to the first marker; return the marker, read, or "" at the end."""
        while True:
            found = markers.find(self._text, self._position)
            # One that has begun before it may still become the first.
            certain = len(self._text)
            if not self.ended:
                certain = markers.partial(self._text, self._position)
            if found is not None and found[0] <= certain:
                self._pass(found[0], emit)
                self._position += len(found[1])
                return found[1]
            self._pass(certain, emit)
            if self.ended:
                return ""
            yield

    def rest(self, emit: Emit) -> Steps[None]:
        """Pass on everything."""
        while True:
            self._pass(len(self._text), emit)
            if self.ended:
                return
            yield

    def peek(self) -> Steps[str]:
        """Return the next character, "" at the end."""
        while self._position == len(self._text) and not self.ended:
            yield
        return self._text[self._position : self._position + 1]

    def skip_space(self) -> Steps[None]:
        """Read white space."""
        while True:
            match = _SPACE.match(self._text, self._position)
            assert match is not None, "it matches nothing, too"
            self._position = match.end()
            if self.ended or self._position < len(self._text):
                return
            yield

    def expect(self, literal: str, *, after_space: bool = False) -> Steps[bool]:
        """Read `literal`, where that is what comes; else read nothing."""
        while True:
            start = self._position
            if after_space:
                match = _SPACE.match(self._text, start)
                assert match is not None, "it matches nothing, too"
                start = match.end()
            have = self._text[start : start + len(literal)]
            if have == literal:
                self._position = start + len(literal)
                return True
            if self.ended or not literal.startswith(have):
                return False
            yield

    def word(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Read as much as matches `pattern`, which must match beginnings of what it matches."""
        while True:
            match = pattern.match(self._text, self._position)
            end = self._position if match is None else match.end()
            if self.ended or end < len(self._text):
                word = self._text[self._position : end]
                self._position = end
                return word
            yield

    def json_value(self, emit: Emit) -> Steps[bool]:
        """Pass on one JSON value; False where brackets do not match or the text ends within.

        Only its extent is checked. What does not belong to it is not read.
        """
        first = yield from self.peek()
        if first == '"':
            return (yield from self._json_string(emit))
        if first not in _CLOSING:
            scalar = yield from self.word(_SCALAR)
            emit(scalar)
            return bool(scalar)
        open_brackets: list[str] = []
        while True:
            yield from self._pass_matching(_OUTSIDE_STRING, emit)
            character = yield from self.peek()
            if character == '"':
                if not (yield from self._json_string(emit)):
                    return False
                continue
            if character in _CLOSING:
                open_brackets.append(_CLOSING[character])
            elif not character or open_brackets.pop() != character:
                return False
            self._pass(self._position + 1, emit)
            if not open_brackets:
                return True

    def _json_string(self, emit: Emit) -> Steps[bool]:
        self._pass(self._position + 1, emit)
        while True:
            yield from self._pass_matching(_INSIDE_STRING, emit)
            character = yield from self.peek()
            if not character:
                return False
            self._pass(self._position + 1, emit)
            if character == '"':
                return True
            if (yield from self.peek()):
                self._pass(self._position + 1, emit)

    def _pass_matching(self, pattern: re.Pattern[str], emit: Emit) -> Steps[None]:
        """Pass on what matches, as it comes."""
        while True:
            match = pattern.match(self._text, self._position)
            assert match is not None, "it matches nothing, too"
            self._pass(match.end(), emit)
            if self.ended or self._position < len(self._text):
                return
            yield

    def _pass(self, end: int, emit: Emit) -> None:
        if end > self._position:
            text = self._text[self._position : end]
            self._position = end
            emit(text)
