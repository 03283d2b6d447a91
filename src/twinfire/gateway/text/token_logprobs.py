"""Log-probabilities as a worker packs them, unpacked token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twinfire.protocol.messages import LogprobRows
from twinfire.protocol.tokens import unpack_floats, unpack_ids

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot carry."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token, how likely it was, and what else was likely there."""

    token_id: int
    logprob: float
    rank: int
    """1 is the most likely token."""
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability), most likely first."""

    def top_and_drawn(self) -> tuple[tuple[int, float], ...]:
        """Return `top`, with the token itself added where it is not among them."""
        if any(token_id == self.token_id for token_id, _ in self.top):
            return self.top
        return (*self.top, (self.token_id, self.logprob))


def unpack_logprobs(token_ids: Sequence[int], rows: LogprobRows) -> list[TokenLogprob]:
    """Return one entry per row; ValueError when the rows are not those of `token_ids`."""
    logprobs = unpack_floats(rows.token_logprobs)
    ranks = unpack_ids(rows.ranks)
    top_ids = unpack_ids(rows.top_ids)
    top_logprobs = unpack_floats(rows.top_logprobs)
    k = rows.k
    if len(logprobs) != len(token_ids) or len(top_ids) != k * len(token_ids):
        raise ValueError(f"{len(logprobs)} rows of log-probabilities for {len(token_ids)} tokens")
    return [
        TokenLogprob(
            token_id=token_id,
            logprob=_finite(logprobs[row]),
            rank=ranks[row],
            top=tuple(
                (top_ids[column], _finite(top_logprobs[column]))
                for column in range(row * k, row * k + k)
            ),
        )
        for row, token_id in enumerate(token_ids)
    ]


def _finite(logprob: float) -> float:
    # Not NaN either: the comparison is false for it.
    return logprob if logprob >= LOWEST_LOGPROB else LOWEST_LOGPROB
