"""Paged attention whose bits depend on a query and its keys alone.

Queries go in tiles of a fixed number of rows and keys in tiles that begin at fixed positions, so
each multiply has one shape. A tile's softmax is built up key tile by key tile in order of
position (the running maximum of arXiv:2112.05682); a key tile that a query cannot see leaves its
sums unchanged to the bit, which lets queries of different lengths share a pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twinfire.kernels.ops import HeadLayout
from twinfire.kernels.step_batch import StepBatch
from twinfire.kernels.torch.kv_memory import KvMemory

_QUERY_ROWS = 16
_KEYS = 256
_MAX_TILES_PER_WAVE = 32
_LOWEST = torch.finfo(torch.float32).min
"""Where the running maximum starts: finite, so that a tile of hidden keys makes no NaN."""

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _QueryTile:
    sequence: int
    rows: Int64Array
    """[_QUERY_ROWS] rows of the step; the last one repeats as padding."""
    positions: Int64Array
    num_rows: int


@dataclass(frozen=True, slots=True)
class _KeyTile:
    """Keys at one position range for the first `num_tiles` query tiles of a wave."""

    num_tiles: int
    block_rows: Tensor
    hidden: Tensor | None
    """[num_tiles, 1, 1, _QUERY_ROWS, _KEYS]; None when every key is seen."""


@dataclass(frozen=True, slots=True)
class _Wave:
    """Query tiles that go through their key tiles together, longest first."""

    rows: Tensor
    """[tiles * _QUERY_ROWS]"""
    key_tiles: tuple[_KeyTile, ...]
    kept: Tensor
    """Which of `rows` are not padding."""


class ExactAttention:
    """One step's attention for one window."""

    def __init__(
        self, batch: StepBatch, heads: HeadLayout, window: int | None, kv: KvMemory
    ) -> None:
        if _KEYS % kv.block_size:
            raise ValueError(f"block size {kv.block_size} does not divide {_KEYS}")
        self._heads = heads
        self._kv = kv
        self._blocks_per_tile = _KEYS // kv.block_size
        tiles = sorted(_query_tiles(batch), key=lambda tile: -int(tile.positions[-1]))
        self._waves = tuple(
            self._wave(batch, tiles[start : start + _MAX_TILES_PER_WAVE], window)
            for start in range(0, len(tiles), _MAX_TILES_PER_WAVE)
        )

    def __call__(self, queries: Tensor, layer: int, scale: float) -> Tensor:
        """Attend [T, query_width]; returns [T, attended_width]."""
        attended = queries.new_empty(len(queries), self._heads.attended_width)
        for wave in self._waves:
            rows = self._attend(queries.index_select(0, wave.rows) * scale, layer, wave)
            attended.index_copy_(0, wave.rows[wave.kept], rows[wave.kept])
        return attended

    def _attend(self, queries: Tensor, layer: int, wave: _Wave) -> Tensor:
        heads = self._heads
        num_tiles = len(wave.rows) // _QUERY_ROWS
        group_rows = heads.queries_per_kv_head * _QUERY_ROWS
        grouped = (
            queries.view(
                num_tiles,
                _QUERY_ROWS,
                heads.num_kv_heads,
                heads.queries_per_kv_head,
                heads.head_dim,
            )
            .permute(0, 2, 3, 1, 4)
            .reshape(-1, group_rows, heads.head_dim)
        )
        maximum = grouped.new_full((len(grouped), group_rows, 1), _LOWEST)
        total = torch.zeros_like(maximum)
        mixed = grouped.new_zeros(*maximum.shape[:2], heads.value_dim or heads.head_dim)
        for tile in wave.key_tiles:
            used = tile.num_tiles * heads.num_kv_heads
            gathered = self._kv.gather(layer, tile.block_rows)
            arrays = gathered.view(-1, used, _KEYS, heads.head_dim)
            keys, values = arrays[0], arrays[-1][..., : heads.value_dim]
            scores = torch.bmm(grouped[:used], keys.transpose(1, 2))
            if tile.hidden is not None:
                shape = (tile.num_tiles, heads.num_kv_heads, -1, _QUERY_ROWS, _KEYS)
                scores.view(shape).masked_fill_(tile.hidden, float("-inf"))
            highest = torch.maximum(maximum[:used], scores.amax(dim=-1, keepdim=True))
            weights = torch.exp(scores - highest)
            decay = torch.exp(maximum[:used] - highest)
            maximum[:used] = highest
            total[:used] = total[:used] * decay + weights.sum(dim=-1, keepdim=True)
            mixed[:used] = mixed[:used] * decay + torch.bmm(weights, values)
        by_query = (mixed / total).view(
            num_tiles, heads.num_kv_heads, heads.queries_per_kv_head, _QUERY_ROWS, -1
        )
        return by_query.permute(0, 3, 1, 2, 4).reshape(-1, heads.attended_width)

    def _wave(self, batch: StepBatch, tiles: list[_QueryTile], window: int | None) -> _Wave:
        positions = np.stack([tile.positions for tile in tiles])
        lowest_keys = positions[:, 0] * 0 if window is None else positions[:, 0] - window + 1
        first = max(0, int(lowest_keys.min())) // _KEYS
        last = int(positions.max()) // _KEYS
        kept = np.arange(_QUERY_ROWS) < np.array([[tile.num_rows] for tile in tiles])
        return _Wave(
            rows=torch.from_numpy(np.concatenate([tile.rows for tile in tiles])),
            key_tiles=tuple(
                self._key_tile(batch, tiles, positions, index, window)
                for index in range(first, last + 1)
            ),
            kept=torch.from_numpy(np.flatnonzero(kept)),
        )

    def _key_tile(
        self,
        batch: StepBatch,
        tiles: list[_QueryTile],
        positions: Int64Array,
        index: int,
        window: int | None,
    ) -> _KeyTile:
        num_tiles = int((positions[:, -1] // _KEYS >= index).sum())
        seen_by = positions[:num_tiles, :, None]
        keys = (index * _KEYS + np.arange(_KEYS))[None, None, :]
        hidden = keys > seen_by
        if window is not None:
            hidden |= keys <= seen_by - window
        sequences = np.array([tile.sequence for tile in tiles[:num_tiles]])
        columns = index * self._blocks_per_tile + np.arange(self._blocks_per_tile)[None, :]
        num_blocks = -(-batch.context_lens[sequences] // self._kv.block_size)[:, None]
        in_table = np.minimum(columns, batch.block_tables.shape[1] - 1)
        table = np.where(
            columns < num_blocks,
            batch.block_tables[sequences[:, None], in_table],
            self._kv.padding_block,
        )
        return _KeyTile(
            num_tiles=num_tiles,
            block_rows=self._tile_rows(table),
            hidden=torch.from_numpy(hidden[:, None, None]) if hidden.any() else None,
        )

    def _tile_rows(self, table: npt.NDArray[np.integer]) -> Tensor:
        # `block_rows` is [k/v and head, tile, block]; a tile's heads must follow each other here.
        planes = self._kv.block_rows(table).view(-1, self._heads.num_kv_heads, *table.shape)
        return planes.transpose(1, 2).reshape(-1)


def _query_tiles(batch: StepBatch) -> Iterator[_QueryTile]:
    starts = batch.query_starts.astype(np.int64)
    for sequence in range(batch.num_sequences):
        for first in range(int(starts[sequence]), int(starts[sequence + 1]), _QUERY_ROWS):
            last = min(first + _QUERY_ROWS, int(starts[sequence + 1])) - 1
            rows = np.minimum(np.arange(first, first + _QUERY_ROWS), last)
            positions = batch.positions[rows].astype(np.int64)
            yield _QueryTile(sequence, rows, positions, last - first + 1)
