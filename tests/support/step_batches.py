"""Sequences fed to a runner by hand: blocks from a counter, any chunking, any mix."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from twinfire.artifacts.draft_head import DraftHead
from twinfire.artifacts.model_config import ModelConfig
from twinfire.artifacts.tensors import WeightSource
from twinfire.cache.kv_group import BLOCK_SIZE
from twinfire.engine.torch_runner import TorchRunner, load_torch_runner
from twinfire.kernels.step_batch import StepBatch


@dataclass
class Fed:
    """A sequence and how much of it a runner has computed."""

    tokens: list[int]
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0


def make_batch(
    pieces: list[tuple[Fed, int]],
    next_block: list[int],
    *,
    every_row: bool = True,
    block_copies: tuple[tuple[int, int], ...] = (),
) -> StepBatch:
    """Pack `count` more tokens of each sequence, giving it the blocks it lacks."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    contexts: list[int] = []
    last_rows: list[int] = []
    for fed, count in pieces:
        end = fed.num_computed + count
        while len(fed.block_ids) * BLOCK_SIZE < end:
            fed.block_ids.append(next_block[0])
            next_block[0] += 1
        for position in range(fed.num_computed, end):
            token_ids.append(fed.tokens[position])
            positions.append(position)
            slots.append(fed.block_ids[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
        fed.num_computed = end
        starts.append(len(token_ids))
        contexts.append(end)
        last_rows.append(len(token_ids) - 1)
    width = max(len(fed.block_ids) for fed, _ in pieces)
    tables = [fed.block_ids + [0] * (width - len(fed.block_ids)) for fed, _ in pieces]
    rows = range(len(token_ids)) if every_row else last_rows
    return StepBatch(
        token_ids=np.array(token_ids, np.int32),
        positions=np.array(positions, np.int32),
        slots=np.array(slots, np.int32),
        query_starts=np.array(starts, np.int32),
        context_lens=np.array(contexts, np.int32),
        block_tables=np.array(tables, np.int32),
        logit_rows=np.array(rows, np.int32),
        block_copies=np.array(block_copies, np.int32).reshape(-1, 2),
    )


class Feeder:
    """Drives one runner."""

    def __init__(self, runner: TorchRunner, num_blocks: int = 256) -> None:
        self.runner = runner
        runner.init_kv(num_blocks)
        # Scattered ids would hide a mix-up of block and position less well than a run from 3.
        self.next_block = [3]

    def step(
        self, pieces: list[tuple[Fed, int]], block_copies: tuple[tuple[int, int], ...] = ()
    ) -> list[np.ndarray]:
        """Compute one step; returns each piece's logits [count, vocab]."""
        batch = make_batch(pieces, self.next_block, block_copies=block_copies)
        self.runner.execute(batch)
        logits = self.runner.logits(0, len(batch.logit_rows)).copy()
        return np.split(logits, batch.query_starts[1:-1])

    def whole(self, tokens: list[int]) -> np.ndarray:
        """Compute a sequence in one step."""
        return self.step([(Fed(tokens), len(tokens))])[0]

    def chunked(self, tokens: list[int], sizes: list[int]) -> np.ndarray:
        """Compute a sequence in chunks of `sizes`, the last one being what is left."""
        fed, rows = Fed(tokens), []
        for size in [*sizes, len(tokens)]:
            count = min(size, len(tokens) - fed.num_computed)
            if count:
                rows += self.step([(fed, count)])
        return np.concatenate(rows)


def load(
    config: ModelConfig,
    weights: WeightSource,
    dtype: str = "f32",
    num_threads: int = 1,
    head: DraftHead | None = None,
) -> TorchRunner:
    """Load with no progress shown."""
    return load_torch_runner(
        config,
        weights,
        dtype=dtype,
        num_threads=num_threads,
        progress=lambda stage, done, total: None,
        head=head,
    )
