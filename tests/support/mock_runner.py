"""A runner without a model: logits are a hash of the tokens that a row's sequence really reads.

Its KV holds one token id per slot, written and copied exactly as a real runner would, so any fault
in block tables, copies or prefix sharing changes the drawn tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from twinfire.cache.kv_group import KvGroup, KvLayout, WireBuffer, WireBytes
from twinfire.kernels.step_batch import StepBatch

UNWRITTEN = -1


class MockRunner:
    def __init__(self, vocab_size: int = 64, block_size: int = 32) -> None:
        self._vocab_size = vocab_size
        group = KvGroup("target", num_layers=1, num_kv_heads=1, head_dim=1, dtype="f32")
        self._layout = KvLayout((group,), block_size)
        self._kv: npt.NDArray[np.int64] = np.empty((0, block_size), np.int64)
        self._rows: list[npt.NDArray[np.int64]] = []
        self.num_tokens_computed = 0

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def kv_layout(self) -> KvLayout:
        return self._layout

    @property
    def weight_bytes(self) -> int:
        return 0

    def init_kv(self, num_blocks: int) -> None:
        self._kv = np.full((num_blocks, self._layout.block_size), UNWRITTEN, np.int64)

    def populate_kv(self, first: int, count: int) -> None:
        del first, count

    def execute(self, batch: StepBatch) -> None:
        if len(batch.block_copies):
            sources, destinations = batch.block_copies[:, 0], batch.block_copies[:, 1]
            self._kv[destinations] = self._kv[sources]
        self.num_tokens_computed += batch.num_tokens
        self._kv.reshape(-1)[batch.slots] = batch.token_ids
        sequence_of_row = np.searchsorted(batch.query_starts, batch.logit_rows, side="right") - 1
        self._rows = [
            self._context(batch, int(sequence), int(row))
            for sequence, row in zip(sequence_of_row, batch.logit_rows, strict=True)
        ]

    def _context(self, batch: StepBatch, sequence: int, row: int) -> npt.NDArray[np.int64]:
        length = int(batch.positions[row]) + 1
        blocks = batch.block_tables[sequence, : -(-length // self._layout.block_size)]
        context = self._kv[blocks].reshape(-1)[:length]
        assert UNWRITTEN not in context, "a sequence reads KV that nobody wrote"
        return context

    def logits(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        return np.stack([mock_logits(row, self._vocab_size) for row in self._rows[start:stop]])

    def export_blocks(self, block_ids: Sequence[int], into: WireBuffer) -> None:
        np.frombuffer(into, np.int64)[:] = self._kv[list(block_ids)].reshape(-1)

    def import_blocks(self, block_ids: Sequence[int], content: WireBytes) -> None:
        values = np.frombuffer(content, np.int64).reshape(len(block_ids), self._kv.shape[1])
        self._kv[list(block_ids)] = values


def mock_logits(context: npt.NDArray[np.int64], vocab_size: int) -> npt.NDArray[np.float32]:
    """Return the logits that follow a context: reproducible, different for every context."""
    seed = 17
    for token_id in context:
        seed = (seed * 1_000_003 + int(token_id) + 1) % (1 << 61)
    return np.random.default_rng(seed).normal(size=vocab_size).astype(np.float32) * 3
