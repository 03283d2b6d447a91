"""Blocks as bytes of the wire layout, for comparing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from twinfire.cache.kv_group import KvLayout, WireBuffer


class Cache(Protocol):
    """The kernels' own KV memory."""

    @property
    def bytes_per_block(self) -> int: ...

    def export_blocks(self, block_ids: Sequence[int], into: WireBuffer) -> None: ...


class Owner(Protocol):
    """A runner."""

    @property
    def kv_layout(self) -> KvLayout: ...

    def export_blocks(self, block_ids: Sequence[int], into: WireBuffer) -> None: ...


def exported(source: Cache | Owner, block_ids: Sequence[int]) -> bytes:
    """Return the blocks."""
    layout: KvLayout | None = getattr(source, "kv_layout", None)
    size: int = (layout or source).bytes_per_block  # type: ignore[union-attr]
    wire = bytearray(len(block_ids) * size)
    source.export_blocks(block_ids, wire)
    return bytes(wire)
