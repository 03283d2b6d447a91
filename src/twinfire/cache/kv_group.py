"""What one KV block is made of: named groups of per-layer arrays.

The canonical wire layout of a group in a block is `[layer][k, v][kv_head][token][head_dim]`, C
order, little-endian; groups follow each other in the order of `KvLayout.groups`. A runner may keep
another layout in memory and converts at the wire.
"""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_SIZE = 32
"""Tokens in a block."""

WireBytes = bytes | bytearray | memoryview
"""Blocks in the wire layout, one after the other; contiguous, of any alignment."""
WireBuffer = bytearray | memoryview
"""Room for such bytes."""

ELEMENT_BYTES = {"f32": 4, "bf16": 2, "f16": 2, "int8": 1}


@dataclass(frozen=True, slots=True)
class KvGroup:
    """One set of K and V arrays, for example those of the target model."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    """A key of ELEMENT_BYTES."""

    def bytes_per_block(self, block_size: int = BLOCK_SIZE) -> int:
        """Bytes of this group in one block."""
        elements = self.num_layers * 2 * self.num_kv_heads * block_size * self.head_dim
        return elements * ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class KvLayout:
    """All groups of a block."""

    groups: tuple[KvGroup, ...]
    block_size: int = BLOCK_SIZE

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all groups."""
        return sum(group.bytes_per_block(self.block_size) for group in self.groups)
