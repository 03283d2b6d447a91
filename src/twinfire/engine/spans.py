"""Packs runs of tokens, each of one sequence, into the arrays of a step batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twinfire.kernels.step_batch import Int32Array, StepBatch


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens at positions from `start` on; `block_ids` hold the sequence from position 0 on."""

    block_ids: Sequence[int]
    start: int
    token_ids: Sequence[int]

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.start + len(self.token_ids)


def row_starts(spans: Sequence[Span]) -> Int32Array:
    """Return the first row of each span, and one past the last row of all [len(spans) + 1]."""
    starts = np.zeros(len(spans) + 1, np.int32)
    np.cumsum([len(span.token_ids) for span in spans], out=starts[1:])
    return starts


def pack_spans(
    spans: Sequence[Span],
    block_size: int,
    logit_rows: Sequence[int],
    block_copies: Sequence[tuple[int, int]] = (),
) -> StepBatch:
    """Return the arrays; rows follow each other in the order of the spans."""
    query_starts = row_starts(spans)
    total = int(query_starts[-1])
    token_ids = np.empty(total, np.int32)
    positions = np.empty(total, np.int32)
    slots = np.empty(total, np.int32)
    block_tables = _block_tables(spans, block_size)
    for row, span in enumerate(spans):
        first, last = query_starts[row], query_starts[row + 1]
        token_ids[first:last] = span.token_ids
        places = np.arange(span.start, span.end, dtype=np.int32)
        positions[first:last] = places
        slots[first:last] = (
            block_tables[row, places // block_size] * block_size + places % block_size
        )
    return StepBatch(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        query_starts=query_starts,
        context_lens=np.fromiter((span.end for span in spans), np.int32, len(spans)),
        block_tables=block_tables,
        logit_rows=np.array(logit_rows, np.int32),
        block_copies=np.array(block_copies, np.int32).reshape(-1, 2),
    )


def pack_rows(token_ids: Sequence[int], block_size: int) -> StepBatch:
    """Return a batch for ops that look at no KV: its positions and slots mean nothing."""
    block_ids = (0,) * -(-len(token_ids) // block_size)
    return pack_spans([Span(block_ids, 0, token_ids)], block_size, range(len(token_ids)))


def _block_tables(spans: Sequence[Span], block_size: int) -> Int32Array:
    widths = [-(-span.end // block_size) for span in spans]
    tables = np.zeros((len(spans), max(widths, default=0)), np.int32)
    for row, (span, width) in enumerate(zip(spans, widths, strict=True)):
        tables[row, :width] = span.block_ids[:width]
    return tables
