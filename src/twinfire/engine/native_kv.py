"""KV memory of a target and its draft head on the native kernels, as one set of blocks.

Each has a cache of its own in the kernels' layout; block ids are the same in both. On the wire a
block is the target's part, then the head's, as `KvLayout` orders the groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twinfire.cache.kv_group import KvGroup, KvLayout, WireBuffer, WireBytes
from twinfire.kernels.cpu._native import KvCache
from twinfire.kernels.step_batch import Int32Array


@dataclass(frozen=True, slots=True)
class CacheShape:
    """One model's cache. `scales_name` is the group of an 8-bit cache's scales."""

    name: str
    scales_name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    """bf16 or int8."""

    @property
    def groups(self) -> tuple[KvGroup, ...]:
        """The groups that a block of it has on the wire."""
        layers, heads = self.num_layers, self.num_kv_heads
        elements = KvGroup(self.name, layers, heads, self.head_dim, self.dtype)
        if self.dtype != "int8":
            return (elements,)
        return (elements, KvGroup(self.scales_name, layers, heads, 1, "f32"))


class NativeKv:
    """All caches of a runner, the target's first. Mapped by `allocate`, once."""

    def __init__(self, shapes: Sequence[CacheShape]) -> None:
        self._shapes = tuple(shapes)
        self._caches: list[KvCache] = []

    @property
    def layout(self) -> KvLayout:
        """The groups of all caches."""
        return KvLayout(tuple(group for shape in self._shapes for group in shape.groups))

    def allocate(self, num_blocks: int) -> None:
        """Map memory; pages are only taken as blocks are written."""
        if self._caches:
            raise RuntimeError("KV memory is already allocated")
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; it must be at least 1")
        self._caches = [
            KvCache(shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.dtype, num_blocks)
            for shape in self._shapes
        ]

    def cache(self, index: int) -> KvCache:
        """Return the cache of the shape at `index`; RuntimeError before `allocate`."""
        return self._allocated()[index]

    def populate(self, first: int, count: int) -> None:
        """Take the pages of blocks [first, first + count) of all caches from the system."""
        for cache in self._allocated():
            cache.populate(first, count)

    def copy_to_heads(self, pairs: Int32Array) -> None:
        """Copy block `pairs[:, 0]` to `pairs[:, 1]` in all caches but the target's.

        A step of the target copies its own.
        """
        if len(pairs):
            for cache in self._allocated()[1:]:
                cache.copy_blocks(pairs)

    def export_blocks(self, block_ids: Sequence[int], into: WireBuffer) -> None:
        """Write the blocks to `into`; ValueError on a block that is none or a wrong size."""
        ids, offset, stride = list(block_ids), 0, self._block_bytes
        for cache in self._allocated():
            cache.export_blocks(ids, into, offset, stride)
            offset += cache.bytes_per_block

    def import_blocks(self, block_ids: Sequence[int], content: WireBytes) -> None:
        """Fill blocks from what `export_blocks` wrote; ValueError likewise."""
        ids, offset, stride = list(block_ids), 0, self._block_bytes
        for cache in self._allocated():
            cache.import_blocks(ids, content, offset, stride)
            offset += cache.bytes_per_block

    @property
    def _block_bytes(self) -> int:
        return sum(cache.bytes_per_block for cache in self._allocated())

    def _allocated(self) -> list[KvCache]:
        if not self._caches:
            raise RuntimeError("init_kv has not been called")
        return self._caches
