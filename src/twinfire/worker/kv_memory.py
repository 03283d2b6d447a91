"""A worker's blocks as connectors see them, on their own threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twinfire.cache.kv_group import KvLayout, WireBuffer, WireBytes
from twinfire.engine.runner import Runner


class WorkerKvMemory:
    """The runner's memory with the engine's generations.

    Blocks in use by the engine and blocks that a connector writes are never the same ones, so no
    lock is held while either works.
    """

    def __init__(
        self,
        runner: Runner,
        num_blocks: int,
        block_generation: Callable[[int], int],
        draft: str = "",
    ) -> None:
        """`draft` is that of the worker's fingerprint."""
        self.draft = draft
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

    def export_blocks(self, block_ids: Sequence[int], into: WireBuffer) -> None:
        """Write blocks to `into` in the wire layout."""
        self._runner.export_blocks(block_ids, into)

    def import_blocks(self, block_ids: Sequence[int], content: WireBytes) -> None:
        """Fill blocks from the wire layout."""
        self._runner.import_blocks(block_ids, content)

    def block_generation(self, block_id: int) -> int:
        """Return the number that rises whenever the block is handed out."""
        return self._block_generation(block_id)
