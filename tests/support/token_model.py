"""A model whose KV can be checked: it computes with the KV that the plan's blocks really hold.

The KV of a token is a number that depends on every token before it, as in a real model. Before a
slice is computed, all KV that it would read is compared with what its sequence's own tokens call
for, so wrong sharing, a lost copy or a block reused too early fails at once.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from twinfire.scheduler.sequence import Sequence
from twinfire.scheduler.step_plan import Slice, StepPlan

VOCAB_SIZE = 1000
_MODULUS = (1 << 61) - 1


def kv_values(tokens: Iterable[int], extra: bytes = b"") -> list[int]:
    """Return the KV of each token."""
    value, values = hash(extra) % _MODULUS, []
    for token in tokens:
        value = (value * 1_000_003 + token + 1) % _MODULUS
        values.append(value)
    return values


def draw(last_value: int, choice: int) -> int:
    """Return the token that a choice draws after a prefix whose last KV is `last_value`."""
    return (last_value * 31 + choice * 7919) % VOCAB_SIZE


def naive_tokens(prompt: list[int], choice: int, num_output: int, extra: bytes = b"") -> list[int]:
    """Return prompt and output as they are with no batch, no blocks and no cache."""
    tokens = list(prompt)
    for _ in range(num_output):
        tokens.append(draw(kv_values(tokens, extra)[-1], choice))
    return tokens


class TokenModel:
    """KV memory of `num_blocks` blocks and a deterministic next token."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.kv = [-1] * (num_blocks * block_size)
        self.num_computed_tokens = 0

    def execute(self, plan: StepPlan) -> dict[Sequence, list[int]]:
        """Compute a plan; return each sequence's drawn token."""
        self._copy_blocks(plan.block_copies)
        computed = [(piece, self._compute(piece)) for piece in plan.slices]
        return {
            piece.sequence: _drawn(piece, values) for piece, values in computed if piece.reaches_end
        }

    def last_prompt_value(self, sequence: Sequence) -> int:
        """Return what every choice of this prompt draws its first token from."""
        prompt = sequence.tokens[: sequence.num_prompt_tokens]
        return kv_values(prompt, sequence.cache_extra)[-1]

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        sources = {source for source, _ in copies}
        destinations = {destination for _, destination in copies}
        assert len(destinations) == len(copies), "two copies into one block"
        assert not sources & destinations, "a copy depends on another copy of the step"
        size = self.block_size
        for source, destination in copies:
            content = self.kv[source * size : (source + 1) * size]
            self.kv[destination * size : (destination + 1) * size] = content

    def _compute(self, piece: Slice) -> list[int]:
        """Write the KV of a slice and return it."""
        sequence = piece.sequence
        tokens = [*sequence.tokens[: piece.known_end], *piece.drafts]
        expected = kv_values(tokens, sequence.cache_extra)
        slots = self._slots(sequence.block_ids, piece.end)
        assert [self.kv[slot] for slot in slots[: piece.start]] == expected[: piece.start], (
            f"{sequence.key} would read KV that is not of its own tokens"
        )
        for slot, value in zip(slots[piece.start :], expected[piece.start :], strict=True):
            self.kv[slot] = value
        self.num_computed_tokens += piece.num_tokens
        return [self.kv[slot] for slot in slots[piece.start :]]

    def _slots(self, block_ids: list[int], num_tokens: int) -> list[int]:
        size = self.block_size
        return [block_ids[i // size] * size + i % size for i in range(num_tokens)]


def _drawn(piece: Slice, values: list[int]) -> list[int]:
    """Return what a choice draws after its last token, and after each draft that it drew."""
    drawn: list[int] = []
    for value, draft in zip(
        values[piece.known_end - piece.start - 1 :], (*piece.drafts, None), strict=True
    ):
        drawn.append(draw(value, piece.sequence.key[2]))
        if drawn[-1] != draft:
            break
    return drawn


def token_array(tokens: Iterable[int]) -> array[int]:
    """Return token ids as sequences hold them."""
    return array("I", tokens)
