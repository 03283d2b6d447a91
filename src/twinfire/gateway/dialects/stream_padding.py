"""Padding of random length for the events of a stream.

Whoever sees only the sizes of encrypted events could read the lengths of the tokens off them, and
guess the text (Weiss et al., "What Was Your Prompt? A Remote Keylogging Attack on AI Assistants",
2024).
"""

from __future__ import annotations

import os
from functools import cache

MAX_PADDING_CHARS = 32
_CHARS = "abcdefghijklmnopqrstuvwxyz012345"
_END = b"}\n\n"
_TAILS = tuple(
    b',"p":"' + _CHARS[:length].encode() + b'"' + _END for length in range(1, MAX_PADDING_CHARS + 1)
)
_NUM_DRAWN = 1024


class StreamPadding:
    """The padding of one stream."""

    __slots__ = ("_drawn", "_next", "_tails")

    def __init__(self, field: str = "p") -> None:
        """`field` is the name under which clients look over it."""
        self._tails = _tails(field)
        self._drawn = b""
        self._next = 0

    def tail(self) -> bytes:
        """Return the end of an event: a field of 1 to MAX_PADDING_CHARS characters."""
        if self._next == len(self._drawn):
            self._drawn = os.urandom(_NUM_DRAWN)
            self._next = 0
        number = self._drawn[self._next]
        self._next += 1
        return self._tails[number % MAX_PADDING_CHARS]

    def pad(self, frames: bytes) -> bytes:
        """Return whole events, each a JSON object with fields, with padding in each."""
        # JSON text holds no line ends, so this is found at the ends of events only.
        return b"".join(part + self.tail() for part in frames.split(_END) if part)


@cache
def _tails(field: str) -> tuple[bytes, ...]:
    head = f',"{field}":"'
    return tuple(
        (head + _CHARS[:length] + '"').encode() + _END for length in range(1, MAX_PADDING_CHARS + 1)
    )
