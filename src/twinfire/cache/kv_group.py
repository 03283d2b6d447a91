"""What one KV block is made of: named groups of per-layer arrays.

The canonical wire layout of a group in a block is `[layer][k, v][kv_head][token][head_dim]`, C
order, little-endian; groups follow each other in the order of `KvLayout.groups`. Latent attention
has no v. A runner may keep another layout in memory and converts at the wire.
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
    values_in_keys: bool = False
    """Keys alone are stored: a value is the beginning of its key, as in latent attention."""

    @property
    def num_arrays(self) -> int:
        """Arrays of a layer: keys and values, or keys alone."""
        return 1 if self.values_in_keys else 2

    @property
    def text(self) -> str:
        """All that must be equal for a block's bytes to mean the same to two workers."""
        shape = f"{self.num_layers}:{self.num_kv_heads}:{self.head_dim}:{self.dtype}"
        return f"{self.name}:{shape}" + (":values in keys" if self.values_in_keys else "")

    def bytes_per_block(self, block_size: int = BLOCK_SIZE) -> int:
        """Bytes of this group in one block."""
        rows = self.num_layers * self.num_arrays * self.num_kv_heads * block_size
        return rows * self.head_dim * ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class KvLayout:
    """All groups of a block."""

    groups: tuple[KvGroup, ...]
    block_size: int = BLOCK_SIZE

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all groups."""
        return sum(group.bytes_per_block(self.block_size) for group in self.groups)
