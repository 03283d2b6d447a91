"""Prompts of a given number of tokens, cut from real text.

Owns the search for the cut. With a server that counts tokens the length is exact for nearly every
prompt; without, it is an estimate, and the report says what the server counted.
"""

from __future__ import annotations

import re
from itertools import cycle, islice

from twinfire.bench.prompt_source import PromptSource
from twinfire.bench.token_counter import TokenCounter, text_units

_PIECE = re.compile(r"\s*\S{1,12}")
_FILLERS = (" the", " of", " and", " to", " in", " is", " for", " that", " with", " on")
_MAX_FILLED_TOKENS = 16
_MAX_PROBES = 12


class PromptBuilder:
    """Draws from one source; prompts share no text unless they are given the same start."""

    def __init__(self, source: PromptSource, counter: TokenCounter) -> None:
        self._source = source
        self.counter = counter

    def fork(self, name: str) -> PromptBuilder:
        """Return a builder with its own supply of text, the same for equal names."""
        return PromptBuilder(self._source.fork(name), self.counter)

    async def prompt(self, num_tokens: int, start: str = "") -> str:
        """Return text that makes a one-message request of `num_tokens` prompt tokens.

        Begins with `start`. The template's own tokens are included, so very small numbers give the
        smallest prompt there is.
        """
        return await self._cut(num_tokens, start)

    async def text(self, num_tokens: int) -> str:
        """Return text of `num_tokens` tokens by itself, to be put into a longer conversation."""
        return await self._cut(num_tokens + self.counter.overhead, "")

    def block(self, num_tokens: int) -> str:
        """Return about `num_tokens` tokens of text, without asking the server."""
        pieces = self._pieces(num_tokens)
        wanted_units = num_tokens / self.counter.per_unit
        share = wanted_units / max(text_units("".join(pieces)), 1)
        return "".join(pieces[: max(round(len(pieces) * share), 1)])

    def _pieces(self, num_tokens: int) -> list[str]:
        wanted_units = num_tokens / self.counter.per_unit
        text = ""
        while text_units(text) < wanted_units:
            missing = wanted_units - text_units(text)
            text += ("\n\n" if text else "") + self._source.take(int(missing * 4) + 40)
        return _PIECE.findall(text)

    async def _cut(self, num_tokens: int, start: str) -> str:
        pieces = _PIECE.findall(start) + self._pieces(round(num_tokens * 1.3) + 32)
        low, high = 1, len(pieces)
        guess = self._estimated_cut(pieces, num_tokens)
        if self.counter.method == "usage":
            return "".join(pieces[:guess])
        best = pieces[:1]
        for _ in range(_MAX_PROBES):
            if low > high:
                break
            guess = min(max(guess, low), high)
            text = "".join(pieces[:guess])
            count = await self._count(text)
            if count > num_tokens:
                high = guess - 1
            else:
                best, low = pieces[:guess], guess + 1
                if num_tokens - count <= _MAX_FILLED_TOKENS:
                    return await self._filled(text, num_tokens)
            per_piece = max(count - self.counter.overhead, 1) / guess
            guess += round((num_tokens - _MAX_FILLED_TOKENS / 2 - count) / per_piece)
        return await self._filled("".join(best), num_tokens)

    def _estimated_cut(self, pieces: list[str], num_tokens: int) -> int:
        wanted_units = (num_tokens - self.counter.overhead) / self.counter.per_unit
        share = wanted_units / max(text_units("".join(pieces)), 1)
        return min(max(round(len(pieces) * share), 1), len(pieces))

    async def _filled(self, text: str, num_tokens: int) -> str:
        """Append common words, each one token in nearly every vocabulary, up to the length."""
        num_fillers = 0
        for _ in range(4):
            filled = text + "".join(islice(cycle(_FILLERS), num_fillers))
            missing = num_tokens - await self._count(filled)
            if missing == 0 or num_fillers + missing < 0:
                return filled
            num_fillers += missing
        return filled

    async def _count(self, text: str) -> int:
        count = await self.counter.count(text)
        return self.counter.estimate(text) if count is None else count
