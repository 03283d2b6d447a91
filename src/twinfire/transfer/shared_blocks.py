"""Blocks as far as two workers have the same groups of them: all, or all but a draft head's.

Every worker of a model has the target's groups; a draft head's come after them and are a worker's
own affair. Where the other end has another head or none, a block travels without them, and what is
filled has zeros in their place: a head can draft badly from that and never change what is said.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from twinfire.cache.kv_group import KvLayout, WireBuffer, WireBytes
from twinfire.engine.draft_runner import DRAFT_GROUP, DRAFT_SCALES_GROUP
from twinfire.transfer.connector import KvMemory


def target_part(layout: KvLayout) -> KvLayout:
    """Return the layout without the groups of a draft head."""
    drafts = (DRAFT_GROUP, DRAFT_SCALES_GROUP)
    groups = tuple(group for group in layout.groups if group.name not in drafts)
    return KvLayout(groups, layout.block_size)


class SharedBlocks:
    """A worker's blocks as an end with the draft groups `their_draft` sees them."""

    def __init__(self, memory: KvMemory, their_draft: str) -> None:
        """`their_draft` is as `KvMemory.draft`; empty leaves the target's groups alone."""
        whole = memory.kv_layout
        self.layout = whole if their_draft == memory.draft else target_part(whole)
        self._memory = memory
        self._whole_bytes = whole.bytes_per_block

    @property
    def bytes_per_block(self) -> int:
        """Of the groups that both ends have."""
        return self.layout.bytes_per_block

    def export_blocks(self, block_ids: Sequence[int], into: WireBuffer) -> None:
        """Write those groups of blocks to `into`, which they fill."""
        if self.bytes_per_block == self._whole_bytes:
            self._memory.export_blocks(block_ids, into)
            return
        whole = np.empty((len(block_ids), self._whole_bytes), np.uint8)
        self._memory.export_blocks(block_ids, memoryview(whole.reshape(-1)))  # type: ignore[arg-type]
        shared = np.frombuffer(into, np.uint8).reshape(len(block_ids), self.bytes_per_block)
        shared[:] = whole[:, : self.bytes_per_block]

    def import_blocks(self, block_ids: Sequence[int], content: WireBytes) -> None:
        """Fill blocks from what `export_blocks` wrote at an end with the same groups in common."""
        if self.bytes_per_block == self._whole_bytes:
            self._memory.import_blocks(block_ids, content)
            return
        whole = np.zeros((len(block_ids), self._whole_bytes), np.uint8)
        shared = np.frombuffer(content, np.uint8).reshape(len(block_ids), self.bytes_per_block)
        whole[:, : self.bytes_per_block] = shared
        self._memory.import_blocks(block_ids, memoryview(whole.reshape(-1)))  # type: ignore[arg-type]
