"""Grammars that were found good already, remembered by digest."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import sha256

from twinfire.protocol.grammar import Grammar

_MAX_REMEMBERED = 1024


class CheckedGrammars:
    """The latest ones. Belongs to the event loop's thread."""

    def __init__(self) -> None:
        self._digests: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, grammar: Grammar) -> bool:
        digest = _digest(grammar)
        if digest not in self._digests:
            return False
        self._digests.move_to_end(digest)
        return True

    def add(self, grammar: Grammar) -> None:
        """Remember that a grammar is good."""
        self._digests[_digest(grammar)] = None
        if len(self._digests) > _MAX_REMEMBERED:
            self._digests.popitem(last=False)


def _digest(grammar: Grammar) -> bytes:
    return sha256(f"{grammar.kind}\0{grammar.text}".encode()).digest()
