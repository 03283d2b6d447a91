"""A prefix cache that compares tokens: no hashes, no chain, only whole prefixes."""

from __future__ import annotations


class NaivePrefixCache:
    """Remembers which block holds the end of which prefix."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._prefix_of_block: dict[int, tuple[int, ...]] = {}

    def insert(self, block_ids: list[int], tokens: list[int]) -> None:
        """Remember the full blocks of a computed sequence."""
        for index in range(len(tokens) // self.block_size):
            end = (index + 1) * self.block_size
            self._prefix_of_block[block_ids[index]] = tuple(tokens[:end])

    def forget(self, block_ids: list[int]) -> None:
        """Drop blocks that were handed out again."""
        for block_id in block_ids:
            self._prefix_of_block.pop(block_id, None)

    def num_hit_blocks(self, tokens: list[int]) -> int:
        """Return the length of the longest usable prefix in blocks."""
        known = set(self._prefix_of_block.values())
        hit = 0
        while (hit + 1) * self.block_size < len(tokens):
            if tuple(tokens[: (hit + 1) * self.block_size]) not in known:
                break
            hit += 1
        return hit
