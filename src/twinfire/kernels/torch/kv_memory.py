"""The bytes of all KV blocks: one array per layer, written by slot and read by block.

Layout in memory: `[k, v][kv_head][block][token][head_dim]`, so that the blocks of a sequence
become one contiguous run per head by copying whole blocks. One block more than asked for stays
zero and pads what a short sequence lacks. A block's unwritten tokens are zeroed when its first
one is written: masked keys are multiplied by a zero weight, which only a finite value survives.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twinfire.cache.kv_group import KvGroup, WireBuffer, WireBytes
from twinfire.kernels.torch.dtypes import torch_dtype

IntArray = npt.NDArray[np.integer]


class KvMemory:
    """KV of `num_blocks` blocks of one group."""

    def __init__(
        self, group: KvGroup, num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        self.group = group
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        self.dtype = torch_dtype(group.dtype)
        self.num_planes = group.num_arrays * group.num_kv_heads
        """K heads of a layer, then its V heads where those are stored."""
        self._blocks_per_plane = num_blocks + 1
        self._block_elements = block_size * group.head_dim
        rows = self.num_planes * self._blocks_per_plane
        self._layers = [
            torch.empty(rows, self._block_elements, dtype=self.dtype, device=device)
            for _ in range(group.num_layers)
        ]
        self.zero_block(self.padding_block)
        self._scratch = torch.empty(0, self._block_elements, dtype=self.dtype, device=device)

    @property
    def padding_block(self) -> int:
        """A block of zeros, for places in a table that no real block fills."""
        return self.num_blocks

    def block_rows(self, block_ids: IntArray) -> Tensor:
        """Return where the blocks lie in every plane: indices for `gather`, plane after plane."""
        planes = np.arange(self.num_planes, dtype=np.int64)[:, None] * self._blocks_per_plane
        return self._to_device((planes + block_ids.reshape(1, -1)).reshape(-1))

    def token_rows(self, slots: IntArray) -> Tensor:
        """Return where the slots lie in every plane: indices for `write`, plane after plane."""
        slots_per_plane = self._blocks_per_plane * self.block_size
        planes = np.arange(self.num_planes, dtype=np.int64)[:, None] * slots_per_plane
        return self._to_device((planes + slots.reshape(1, -1)).reshape(-1))

    def gather(self, layer: int, block_rows: Tensor) -> Tensor:
        """Copy blocks out, [rows, block_size * head_dim], valid until the next gather."""
        needed = len(block_rows)
        if needed > len(self._scratch):
            self._scratch = self._scratch.new_empty(needed, self._block_elements)
        return torch.index_select(self._layers[layer], 0, block_rows, out=self._scratch[:needed])

    def write(self, layer: int, token_rows: Tensor, kv: Tensor) -> None:
        """Store `kv` [tokens, planes * head_dim] (all keys, then any values) at `token_rows`."""
        head_dim = self.group.head_dim
        by_plane = kv.view(kv.shape[0], self.num_planes, head_dim).transpose(0, 1)
        self._layers[layer].view(-1, head_dim).index_copy_(
            0, token_rows, by_plane.reshape(-1, head_dim)
        )

    def zero_rows(self, layer: int, block_rows: Tensor) -> None:
        """Fill the blocks at `block_rows` of one layer with zeros."""
        self._layers[layer].index_fill_(0, block_rows, 0.0)

    def zero_block(self, block_id: int) -> None:
        """Fill one block of every layer with zeros."""
        rows = self.block_rows(np.array([block_id]))
        for layer in range(len(self._layers)):
            self.zero_rows(layer, rows)

    def copy_blocks(self, pairs: IntArray) -> None:
        """Copy block `pairs[:, 0]` to block `pairs[:, 1]` in every layer."""
        sources, destinations = self.block_rows(pairs[:, 0]), self.block_rows(pairs[:, 1])
        for layer in self._layers:
            layer.index_copy_(0, destinations, layer.index_select(0, sources))

    @property
    def bytes_per_block(self) -> int:
        """Of the wire layout."""
        return self.group.bytes_per_block(self.block_size)

    def export_blocks(self, block_ids: Sequence[int], into: WireBuffer) -> None:
        """Write the blocks to `into` in the canonical wire layout, block after block."""
        ids = self._checked(block_ids, into)
        rows = self.block_rows(ids)
        per_layer = [
            layer.index_select(0, rows)
            .view(self.num_planes, len(ids), self._block_elements)
            .transpose(0, 1)
            for layer in self._layers
        ]
        wire = torch.stack(per_layer, dim=1).contiguous().cpu()
        np.frombuffer(into, np.uint8)[:] = wire.view(torch.uint8).numpy().reshape(-1)

    def import_blocks(self, block_ids: Sequence[int], content: WireBytes) -> None:
        """Fill blocks from what `export_blocks` wrote; ValueError when the size does not fit."""
        ids = self._checked(block_ids, content)
        if not len(ids):
            return
        rows = self.block_rows(ids)
        flat = torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy())
        wire = flat.view(self.dtype).to(self.device)
        shaped = wire.view(len(ids), len(self._layers), self.num_planes, self._block_elements)
        for index, layer in enumerate(self._layers):
            by_plane = shaped[:, index].transpose(0, 1).reshape(-1, self._block_elements)
            layer.index_copy_(0, rows, by_plane)

    def _checked(self, block_ids: Sequence[int], wire: WireBytes) -> npt.NDArray[np.int64]:
        ids = np.asarray(block_ids, dtype=np.int64)
        if any(not 0 <= block_id < self.num_blocks for block_id in block_ids):
            raise ValueError(f"block ids must lie in [0, {self.num_blocks})")
        num_bytes, expected = memoryview(wire).nbytes, len(ids) * self.bytes_per_block
        if num_bytes != expected:
            raise ValueError(f"{num_bytes} bytes for {len(ids)} blocks; they take {expected}")
        return ids

    def _to_device(self, indices: npt.NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(indices)).to(self.device)
