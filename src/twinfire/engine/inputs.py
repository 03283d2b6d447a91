"""Packs a step plan into the arrays of a step batch.

Owns the order of the logit rows: first the rows that tokens are drawn from, choice by choice, then
the prompt rows whose log-probabilities were asked for, last those that are pooled.
"""

from __future__ import annotations

from dataclasses import dataclass

from twinfire.engine.pooled_states import PooledStates
from twinfire.engine.request import Request
from twinfire.engine.spans import Span, pack_spans, row_starts
from twinfire.kernels.step_batch import Int32Array, StepBatch
from twinfire.scheduler.sequence import Sequence
from twinfire.scheduler.step_plan import Slice, StepPlan


@dataclass(frozen=True, slots=True)
class DrawRows:
    """The logit rows [first_row, first_row + count) that one choice draws from, one after another.

    Row i + 1 counts only if row i draws draft i of the piece.
    """

    piece: Slice
    request: Request
    choice: int
    first_row: int

    @property
    def count(self) -> int:
        """One more than there are drafts."""
        return 1 + len(self.piece.drafts)

    @property
    def first_position(self) -> int:
        """Of the token that the first row draws, counted from the prompt's start."""
        return self.piece.known_end


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Logit rows [first_row, first_row + count) score prompt tokens from `first_token` on."""

    request: Request
    first_row: int
    first_token: int
    count: int


@dataclass(frozen=True, slots=True)
class PooledRows:
    """Rows [first_row, first_row + count) are the hidden states that come next to be pooled."""

    states: PooledStates
    first_row: int
    count: int


@dataclass(frozen=True, slots=True)
class PackedStep:
    """A batch and the meaning of its logit rows."""

    batch: StepBatch
    draws: list[DrawRows]
    num_draw_rows: int
    prompt_rows: list[PromptRows]
    pooled_rows: list[PooledRows]


def pack_step(plan: StepPlan, requests: dict[Sequence, Request], block_size: int) -> PackedStep:
    """Return the arrays for `plan`; `requests` maps each planned sequence to its request."""
    slices = plan.slices
    spans = [_span(piece) for piece in slices]
    query_starts = row_starts(spans)
    logit_rows, draws, prompt_rows = _logit_rows(slices, requests, query_starts)
    pooled_rows = _add_pooled_rows(logit_rows, slices, requests, query_starts)
    batch = pack_spans(spans, block_size, logit_rows, plan.block_copies)
    num_draw_rows = sum(draw.count for draw in draws)
    return PackedStep(batch, draws, num_draw_rows, prompt_rows, pooled_rows)


def _span(piece: Slice) -> Span:
    known = piece.sequence.tokens[piece.start : piece.known_end]
    token_ids = [*known, *piece.drafts] if piece.drafts else known
    return Span(piece.sequence.block_ids, piece.start, token_ids)


def _logit_rows(
    slices: list[Slice], requests: dict[Sequence, Request], query_starts: Int32Array
) -> tuple[list[int], list[DrawRows], list[PromptRows]]:
    rows: list[int] = []
    draws: list[DrawRows] = []
    for index, piece in enumerate(slices):
        request = requests[piece.sequence]
        if not piece.reaches_end or request.sampling.max_tokens == 0:
            continue
        # A prompt's last row serves the first token of every choice that forks from it.
        for choice in request.choices_drawing_from(piece.sequence):
            stop = int(query_starts[index + 1])
            draws.append(DrawRows(piece, request, choice, len(rows)))
            rows.extend(range(stop - 1 - len(piece.drafts), stop))
    prompt_rows: list[PromptRows] = []
    for index, piece in enumerate(slices):
        request = requests[piece.sequence]
        first, stop = request.prompt_rows_wanted(piece.start, piece.end)
        if first < stop:
            prompt_rows.append(PromptRows(request, len(rows), first + 1, stop - first))
            offset = int(query_starts[index]) - piece.start
            rows.extend(range(offset + first, offset + stop))
    return rows, draws, prompt_rows


def _add_pooled_rows(
    rows: list[int],
    slices: list[Slice],
    requests: dict[Sequence, Request],
    query_starts: Int32Array,
) -> list[PooledRows]:
    """Append the rows whose hidden states are pooled to `rows`."""
    pooled: list[PooledRows] = []
    for index, piece in enumerate(slices):
        states = requests[piece.sequence].embedding
        if states is None:
            continue
        first, stop = states.rows_wanted(piece.start, piece.end)
        if first < stop:
            pooled.append(PooledRows(states, len(rows), stop - first))
            offset = int(query_starts[index]) - piece.start
            rows.extend(range(offset + first, offset + stop))
    return pooled
