"""KV memory of a target and its draft head on torch, as one set of blocks.

Block ids are the same in all groups. On the wire a block is its groups' parts in order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from twinfire.cache.kv_group import BLOCK_SIZE, KvGroup, KvLayout, WireBuffer, WireBytes
from twinfire.kernels.step_batch import Int32Array
from twinfire.kernels.torch.kv_memory import KvMemory


class TorchKv:
    """The memory of every group, the target's first. Made by `allocate`, once."""

    def __init__(self, groups: Sequence[KvGroup], device: torch.device) -> None:
        self.layout = KvLayout(tuple(groups))
        self._device = device
        self._memories: list[KvMemory] = []

    def allocate(self, num_blocks: int) -> None:
        """Allocate; pages are only taken as blocks are written."""
        if self._memories:
            raise RuntimeError("KV memory is already allocated")
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; it must be at least 1")
        self._memories = [
            KvMemory(group, num_blocks, BLOCK_SIZE, self._device) for group in self.layout.groups
        ]

    def memory(self, index: int) -> KvMemory:
        """Return the memory of the group at `index`; RuntimeError before `allocate`."""
        return self._allocated()[index]

    def copy_blocks(self, pairs: Int32Array) -> None:
        """Copy block `pairs[:, 0]` to `pairs[:, 1]` in every group."""
        for memory in self._allocated():
            if len(pairs):
                memory.copy_blocks(pairs)

    def export_blocks(self, block_ids: Sequence[int], into: WireBuffer) -> None:
        """Write the blocks to `into`; ValueError on a block that is none or a wrong size."""
        memories = self._allocated()
        if len(memories) == 1 or not len(block_ids):
            memories[0].export_blocks(block_ids, into)
            return
        wire = self._by_block(np.frombuffer(into, np.uint8), len(block_ids))
        start = 0
        for memory in memories:
            part = bytearray(len(block_ids) * memory.bytes_per_block)
            memory.export_blocks(block_ids, part)
            by_block = np.frombuffer(part, np.uint8).reshape(len(block_ids), -1)
            wire[:, start : start + memory.bytes_per_block] = by_block
            start += memory.bytes_per_block

    def import_blocks(self, block_ids: Sequence[int], content: WireBytes) -> None:
        """Fill blocks from what `export_blocks` wrote; ValueError likewise."""
        memories = self._allocated()
        if len(memories) == 1:
            memories[0].import_blocks(block_ids, content)
            return
        wire = self._by_block(np.frombuffer(content, np.uint8), len(block_ids))
        start = 0
        for memory in memories:
            part = wire[:, start : start + memory.bytes_per_block]
            memory.import_blocks(block_ids, part.tobytes())
            start += memory.bytes_per_block

    def _by_block(self, wire: np.ndarray, num_blocks: int) -> np.ndarray:
        expected = num_blocks * self.layout.bytes_per_block
        if len(wire) != expected:
            raise ValueError(f"{len(wire)} bytes for {num_blocks} blocks; they take {expected}")
        return wire.reshape(num_blocks, self.layout.bytes_per_block)

    def _allocated(self) -> list[KvMemory]:
        if not self._memories:
            raise RuntimeError("init_kv has not been called")
        return self._memories
