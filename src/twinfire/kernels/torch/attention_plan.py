"""What the fast attention of one step reads, decided once and used by every layer with that window.

Sequences with one query are attended together in groups of similar length, since a group is as
wide as its longest; each longer run of queries is a chunk of its own. Arrays only, no tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twinfire.kernels.step_batch import StepBatch

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

_SHORT_BLOCKS = 4
"""Groups this narrow waste too little to be split."""
_LEAST_FILL = 0.75
"""A group takes only sequences at least this fraction of its longest."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """S sequences of one query each, B blocks wide."""

    rows: Int64Array
    """[S] rows of the step's packed tokens."""
    block_table: Int64Array
    """[S, B] padded with the padding block."""
    visible: BoolArray
    """[S, B * block_size] which gathered tokens the query sees."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive queries of one sequence."""

    first_row: int
    num_rows: int
    first_position: int
    """Position of the first query."""
    block_ids: Int64Array
    first_key_position: int
    """Position of the first token of `block_ids[0]`."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """One step's work for one window."""

    groups: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]


def plan_attention(
    batch: StepBatch,
    window: int | None,
    block_size: int,
    padding_block: int,
    max_group_blocks: int,
) -> AttentionPlan:
    """Divide a step; a group of several sequences gathers at most `max_group_blocks`."""
    num_rows = np.diff(batch.query_starts)
    first_positions = batch.context_lens - num_rows
    first_blocks = np.zeros_like(batch.context_lens)
    if window is not None:
        first_blocks = np.maximum(first_positions - window + 1, 0) // block_size
    num_blocks = -(-batch.context_lens // block_size) - first_blocks

    decoding = np.flatnonzero(num_rows == 1)
    decoding = decoding[np.argsort(-num_blocks[decoding], kind="stable")]
    groups = tuple(
        _group(batch, members, first_blocks, window, block_size, padding_block)
        for members in _split_by_length(decoding, num_blocks, max_group_blocks)
    )
    chunks = tuple(
        Chunk(
            first_row=int(batch.query_starts[s]),
            num_rows=int(num_rows[s]),
            first_position=int(first_positions[s]),
            block_ids=batch.block_tables[
                s, first_blocks[s] : first_blocks[s] + num_blocks[s]
            ].astype(np.int64),
            first_key_position=int(first_blocks[s]) * block_size,
        )
        for s in np.flatnonzero(num_rows > 1)
    )
    return AttentionPlan(groups, chunks)


def _split_by_length(
    members: Int64Array, num_blocks: npt.NDArray[np.int32], max_group_blocks: int
) -> Iterator[Int64Array]:
    start = 0
    while start < len(members):
        widest = int(num_blocks[members[start]])
        least = 0 if widest <= _SHORT_BLOCKS else widest * _LEAST_FILL
        stop = start + 1
        while (
            stop < len(members)
            and num_blocks[members[stop]] >= least
            and (stop + 1 - start) * widest <= max_group_blocks
        ):
            stop += 1
        yield members[start:stop]
        start = stop


def _group(
    batch: StepBatch,
    members: Int64Array,
    first_blocks: npt.NDArray[np.int32],
    window: int | None,
    block_size: int,
    padding_block: int,
) -> DecodeGroup:
    contexts = batch.context_lens[members].astype(np.int64)[:, None]
    firsts = first_blocks[members].astype(np.int64)[:, None]
    counts = -(-contexts // block_size) - firsts
    columns = np.arange(int(counts.max()))[None, :]
    in_table = np.minimum(firsts + columns, batch.block_tables.shape[1] - 1)
    block_table = np.where(
        columns < counts, batch.block_tables[members[:, None], in_table], padding_block
    )
    keys = firsts * block_size + np.arange(columns.shape[1] * block_size)[None, :]
    visible = keys < contexts
    if window is not None:
        visible &= keys >= contexts - window
    return DecodeGroup(
        rows=batch.query_starts[members].astype(np.int64),
        block_table=block_table.astype(np.int64),
        visible=visible,
    )
