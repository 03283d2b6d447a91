"""Paged attention by copying whole blocks into contiguous runs, then plain batched multiplies.

All queries that share a KV head are rows of one multiply. Single queries of many sequences go
together, padded to their group's longest; chunks go in tiles of queries that stop at their own
diagonal, so that no score above it is computed. Scores of a tile stay small enough for the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twinfire.kernels.ops import HeadLayout
from twinfire.kernels.step_batch import StepBatch
from twinfire.kernels.torch.attention_plan import Chunk, DecodeGroup, plan_attention
from twinfire.kernels.torch.kv_memory import KvMemory
from twinfire.kernels.torch.scratch import Scratch

_MAX_GATHER_BYTES = 16 * 1024 * 1024
_MAX_SCORES = 4 * 1024 * 1024
_LEAST_TILE_ROWS = 16
_MOST_TILE_ROWS = 128
_NEG_INF = float("-inf")


@dataclass(frozen=True, slots=True)
class _ReadyGroup:
    rows: Tensor
    block_rows: Tensor
    mask: Tensor
    """[1, S, 1, L] added to scores."""


@dataclass(frozen=True, slots=True)
class _Tile:
    """Queries [start, stop) of a chunk against gathered keys [first_key, end_key)."""

    start: int
    stop: int
    first_key: int
    end_key: int
    mask: Tensor
    """[stop - start, M] added to the scores of the last M keys."""


@dataclass(frozen=True, slots=True)
class _ReadyChunk:
    first_row: int
    block_rows: Tensor
    tiles: tuple[_Tile, ...]


class FastAttention:
    """One step's attention for one window."""

    def __init__(
        self,
        batch: StepBatch,
        heads: HeadLayout,
        window: int | None,
        kv: KvMemory,
        scratch: Scratch,
    ) -> None:
        self._heads = heads
        self._kv = kv
        self._scratch = scratch
        self._dtype = kv.dtype
        block_bytes = kv.group.bytes_per_block(kv.block_size) // kv.group.num_layers
        plan = plan_attention(
            batch, window, kv.block_size, kv.padding_block, _MAX_GATHER_BYTES // block_bytes
        )
        self._groups = tuple(self._ready_group(group) for group in plan.groups)
        self._chunks = tuple(self._ready_chunk(chunk, window) for chunk in plan.chunks)

    def __call__(self, queries: Tensor, layer: int, scale: float) -> Tensor:
        """Attend [T, query_width]; returns [T, attended_width]."""
        heads = self._heads
        shape = (-1, heads.num_kv_heads, heads.queries_per_kv_head, heads.head_dim)
        scaled = (queries * scale).view(shape)
        attended = scaled.new_empty(*scaled.shape[:-1], heads.value_dim or heads.head_dim)
        for group in self._groups:
            self._attend_group(scaled, attended, layer, group)
        for chunk in self._chunks:
            keys, values = self._gather(layer, chunk.block_rows, heads.num_kv_heads)
            for tile in chunk.tiles:
                self._attend_tile(scaled, attended, keys, values, chunk.first_row, tile)
        return attended.view(-1, heads.attended_width)

    def _gather(self, layer: int, block_rows: Tensor, num_runs: int) -> tuple[Tensor, Tensor]:
        gathered = self._kv.gather(layer, block_rows)
        arrays = gathered.view(self._kv.group.num_arrays, num_runs, -1, self._heads.head_dim)
        return arrays[0], arrays[-1][..., : self._heads.value_dim]

    def _attend_group(
        self, scaled: Tensor, attended: Tensor, layer: int, group: _ReadyGroup
    ) -> None:
        heads = self._heads
        num_sequences, num_runs = len(group.rows), heads.num_kv_heads * len(group.rows)
        keys, values = self._gather(layer, group.block_rows, num_runs)
        rows = scaled.index_select(0, group.rows).transpose(0, 1)
        scores = torch.bmm(
            rows.reshape(num_runs, heads.queries_per_kv_head, heads.head_dim), keys.transpose(1, 2)
        )
        scores.view(heads.num_kv_heads, num_sequences, heads.queries_per_kv_head, -1).add_(
            group.mask
        )
        mixed = torch.bmm(torch.softmax(scores, dim=-1), values)
        by_sequence = mixed.view(*rows.shape[:-1], -1).transpose(0, 1)
        attended.index_copy_(0, group.rows, by_sequence)

    def _attend_tile(
        self,
        scaled: Tensor,
        attended: Tensor,
        keys: Tensor,
        values: Tensor,
        first_row: int,
        tile: _Tile,
    ) -> None:
        heads = self._heads
        rows = slice(first_row + tile.start, first_row + tile.stop)
        num_rows = tile.stop - tile.start
        queries = scaled[rows].permute(1, 2, 0, 3)
        shape = (
            heads.num_kv_heads,
            heads.queries_per_kv_head * num_rows,
            tile.end_key - tile.first_key,
        )
        scores = self._scratch.take("scores", shape, self._dtype)
        weights = self._scratch.take("weights", shape, self._dtype)
        torch.bmm(
            queries.reshape(heads.num_kv_heads, -1, heads.head_dim),
            keys[:, tile.first_key : tile.end_key].transpose(1, 2),
            out=scores,
        )
        by_query = scores.view(heads.num_heads, num_rows, -1)
        by_query[..., -tile.mask.shape[1] :].add_(tile.mask)
        torch.softmax(scores, dim=-1, out=weights)
        mixed = torch.bmm(weights, values[:, tile.first_key : tile.end_key])
        attended[rows] = mixed.view(*queries.shape[:-1], -1).permute(2, 0, 1, 3)

    def _ready_group(self, group: DecodeGroup) -> _ReadyGroup:
        device = self._kv.device
        hidden = torch.from_numpy(~group.visible).to(device)
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=device)
        return _ReadyGroup(
            rows=torch.from_numpy(group.rows).to(device),
            block_rows=self._kv.block_rows(group.block_table),
            mask=mask.masked_fill_(hidden, _NEG_INF)[None, :, None, :],
        )

    def _ready_chunk(self, chunk: Chunk, window: int | None) -> _ReadyChunk:
        context = chunk.first_position + chunk.num_rows - chunk.first_key_position
        most = _MAX_SCORES // (self._heads.num_heads * context)
        tile_rows = max(_LEAST_TILE_ROWS, min(_MOST_TILE_ROWS, most // 16 * 16))
        tiles = tuple(
            self._tile(chunk, start, min(start + tile_rows, chunk.num_rows), window)
            for start in range(0, chunk.num_rows, tile_rows)
        )
        return _ReadyChunk(chunk.first_row, self._kv.block_rows(chunk.block_ids), tiles)

    def _tile(self, chunk: Chunk, start: int, stop: int, window: int | None) -> _Tile:
        first_query = chunk.first_position - chunk.first_key_position + start
        num_rows = stop - start
        end_key = first_query + num_rows
        first_key = 0 if window is None else max(0, first_query - window + 1)
        # Without a window everything left of the tile's own square is seen by all its queries.
        num_masked = num_rows if window is None else end_key - first_key
        queries = torch.arange(num_rows, device=self._kv.device)[:, None]
        keys = torch.arange(num_rows - num_masked, num_rows, device=self._kv.device)[None, :]
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._kv.device)
        return _Tile(start, stop, first_key, end_key, mask.masked_fill_(hidden, _NEG_INF))
