"""Changes to a row of logits before a token is drawn: masks, bias, penalties.

Works in place on one float32 row. A token is forbidden by minus infinity. The order is that of
`SamplingParams`. Draws nothing and keeps no state.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from twinfire.engine.token_history import TokenHistory
from twinfire.protocol.sampling import SamplingParams

Row = npt.NDArray[np.float32]


def changes_logits(params: SamplingParams, num_output: int) -> bool:
    """Whether `process_logits` would touch the row."""
    return bool(
        params.allowed_token_ids
        or params.bad_words
        or params.logit_bias
        or num_output < params.min_tokens
        or params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def process_logits(row: Row, params: SamplingParams, history: TokenHistory) -> None:
    """Apply all that `params` asks for to `row` [vocab], in place."""
    unmasked = row.copy() if params.allowed_token_ids or params.bad_words else None
    if params.allowed_token_ids:
        _keep_only(row, params.allowed_token_ids)
    if params.bad_words:
        _forbid_bad_words(row, params, history)
    if history.num_output < params.min_tokens:
        row[_ids(params.ending_token_ids)] = -np.inf
    if unmasked is not None and np.isneginf(row.max()):
        # The masks leave nothing. What the caller allowed outlives what it forbade.
        row[:] = unmasked
        if params.allowed_token_ids:
            _keep_only(row, params.allowed_token_ids)
    for token_id, bias in params.logit_bias:
        row[token_id] += bias
    _penalise(row, params, history)


def _keep_only(row: Row, token_ids: tuple[int, ...]) -> None:
    kept = _ids(token_ids)
    values = row[kept]
    row[:] = -np.inf
    row[kept] = values


def _forbid_bad_words(row: Row, params: SamplingParams, history: TokenHistory) -> None:
    output = history.output
    for word in params.bad_words:
        prefix_len = len(word) - 1
        if prefix_len <= len(output) and tuple(output[len(output) - prefix_len :]) == word[:-1]:
            row[word[-1]] = -np.inf


def _penalise(row: Row, params: SamplingParams, history: TokenHistory) -> None:
    if params.repetition_penalty != 1.0:
        ids = history.seen_ids()
        values = row[ids]
        row[ids] = np.where(
            values > 0, values / params.repetition_penalty, values * params.repetition_penalty
        )
    if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
        ids, counts = history.output_counts()
        row[ids] -= params.frequency_penalty * counts + np.float32(params.presence_penalty)


def _ids(token_ids: tuple[int, ...] | frozenset[int]) -> npt.NDArray[np.int64]:
    return np.fromiter(token_ids, np.int64, len(token_ids))
