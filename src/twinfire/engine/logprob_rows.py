"""Joins reports of log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from twinfire.protocol.messages import LogprobRows


def join_logprob_rows(parts: Sequence[LogprobRows]) -> LogprobRows:
    """Return the rows of all parts, one after the other; they report equally many top tokens."""
    if len(parts) == 1:
        return parts[0]
    return LogprobRows(
        k=parts[0].k if parts else 0,
        token_logprobs=b"".join(part.token_logprobs for part in parts),
        ranks=b"".join(part.ranks for part in parts),
        top_ids=b"".join(part.top_ids for part in parts),
        top_logprobs=b"".join(part.top_logprobs for part in parts),
    )
