"""A worker's blocks as connectors see them, on their own threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twinfire.cache.kv_group import KvLayout
from twinfire.engine.runner import Runner
from twinfire.transfer.connector import KvContent


class WorkerKvMemory:
    """The runner's memory with the engine's generations.

    Blocks in use by the engine and blocks that a connector writes are never the same ones, so no
    lock is held while either works.
    """

    def __init__(
        self, runner: Runner, num_blocks: int, block_generation: Callable[[int], int]
    ) -> None:
        self._runner = runner
        self._num_blocks = num_blocks
        self._block_generation = block_generation

    @property
    def kv_layout(self) -> KvLayout:
        """What a block is made of."""
        return self._runner.kv_layout

    @property
    def num_blocks(self) -> int:
        """Ids lie in [0, num_blocks)."""
        return self._num_blocks

    def export_blocks(self, block_ids: Sequence[int]) -> bytes:
        """Return blocks in the wire layout."""
        return self._runner.export_blocks(block_ids)

    def import_blocks(self, block_ids: Sequence[int], content: KvContent) -> None:
        """Fill blocks from the wire layout."""
        self._runner.import_blocks(block_ids, bytes(content))

    def block_generation(self, block_id: int) -> int:
        """Return the number that rises whenever the block is handed out."""
        return self._block_generation(block_id)
