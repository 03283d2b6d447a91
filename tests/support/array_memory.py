"""KV memory in an array, whose blocks show whose content they hold."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from twinfire.cache.kv_group import KvGroup, KvLayout, WireBuffer, WireBytes

SMALL = KvLayout((KvGroup("target", 2, 2, 8, "bf16"), KvGroup("scales", 2, 2, 1, "f32")), 4)
"""1,152 bytes a block."""
LARGE = KvLayout((KvGroup("target", 30, 3, 64, "bf16"),), 32)
"""Those of the default model: 737,280 bytes a block."""


def content_of(
    owner: int, block_id: int, generation: int, layout: KvLayout
) -> npt.NDArray[np.uint32]:
    """What a block of that generation holds, different in every word."""
    words = np.arange(layout.bytes_per_block // 4, dtype=np.uint32)
    mixed = (owner * 1_000_003 + block_id * 8191 + generation * 131) * 2654435761
    return words * np.uint32(2246822519) + np.uint32(mixed & 0xFFFFFFFF)


class ArrayMemory:
    """Implements `KvMemory`. Blocks begin with generation 1 and the content that belongs to it."""

    def __init__(
        self, num_blocks: int, layout: KvLayout = SMALL, owner: int = 1, draft: str = ""
    ) -> None:
        self.kv_layout = layout
        self.draft = draft
        self.num_blocks = num_blocks
        self.owner = owner
        self.words = np.zeros((num_blocks, layout.bytes_per_block // 4), np.uint32)
        self.generations = [0] * num_blocks
        self.written = [0] * num_blocks
        """The generation whose content is in place."""
        self.imports: list[list[int]] = []
        self._lock = threading.Lock()

    def hand_out(self, block_id: int) -> None:
        """Give the block to somebody who writes it anew."""
        self.generations[block_id] += 1
        self.words[block_id] = self.expected(block_id)
        self.written[block_id] = self.generations[block_id]

    def fill(self) -> ArrayMemory:
        for block_id in range(self.num_blocks):
            self.hand_out(block_id)
        return self

    def expected(self, block_id: int, generation: int | None = None) -> npt.NDArray[np.uint32]:
        if generation is None:
            generation = self.generations[block_id]
        return content_of(self.owner, block_id, generation, self.kv_layout)

    def export_blocks(self, block_ids: Sequence[int], into: WireBuffer) -> None:
        # Block by block, so that other threads get in between.
        wire = np.frombuffer(into, np.uint32).reshape(len(block_ids), -1)
        for words, block_id in zip(wire, block_ids, strict=True):
            words[:] = self.words[block_id]

    def import_blocks(self, block_ids: Sequence[int], content: WireBytes) -> None:
        blocks = np.frombuffer(content, np.uint32).reshape(len(block_ids), -1)
        for block_id, words in zip(block_ids, blocks, strict=True):
            self.words[block_id] = words
        with self._lock:
            self.imports.append(list(block_ids))

    def block_generation(self, block_id: int) -> int:
        return self.generations[block_id]
