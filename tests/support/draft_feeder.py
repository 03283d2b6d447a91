"""Sequences drafted by hand on a runner with a head: any chunking, any mix."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from support.native_runners import load_native
from support.step_batches import Fed, load, make_batch
from support.tiny_models import TinyModel
from twinfire.artifacts.draft_head import DraftHead
from twinfire.engine.draft_runner import DraftedTokens
from twinfire.engine.native_runner import NativeRunner
from twinfire.engine.torch_runner import TorchRunner
from twinfire.kernels.step_batch import StepBatch


def assert_same_drafts(first: DraftedTokens, second: DraftedTokens) -> None:
    np.testing.assert_array_equal(first.token_ids, second.token_ids)
    np.testing.assert_array_equal(first.probabilities, second.probabilities)


class DraftFeeder:
    """Drives one runner. Sequences need one token more than is computed of them."""

    def __init__(self, runner: NativeRunner | TorchRunner, num_blocks: int = 96) -> None:
        assert runner.draft is not None
        self.runner, self.draft = runner, runner.draft
        runner.init_kv(num_blocks)
        self.next_block = [3]

    def execute(
        self, pieces: list[tuple[Fed, int]], block_copies: tuple[tuple[int, int], ...] = ()
    ) -> StepBatch:
        """Run the target; returns the step that `first` takes, one logit row for each token."""
        batch = make_batch(pieces, self.next_block, block_copies=block_copies)
        self.runner.execute(batch)
        followers = [
            fed.tokens[position + 1]
            for fed, count in pieces
            for position in range(fed.num_computed - count, fed.num_computed)
        ]
        return replace(
            batch,
            token_ids=np.array(followers, np.int32),
            block_copies=np.zeros((0, 2), np.int32),
        )

    def first(self, pieces: list[tuple[Fed, int]]) -> list[DraftedTokens]:
        """Run the target, then draft after every token of each sequence."""
        batch = self.execute(pieces)
        drafted = self.draft.first(batch, np.arange(batch.num_tokens, dtype=np.int32))
        return _split(drafted, batch)

    def chains(self, pieces: list[tuple[Fed, int]], num_drafts: int) -> list[DraftedTokens]:
        """Run the target, then draft `num_drafts` tokens after each sequence's last one."""
        batch = self.execute(pieces)
        last_rows = batch.query_starts[1:] - 1
        batch = replace(batch, logit_rows=last_rows)
        drafted = [self.draft.first(batch, np.arange(batch.num_tokens, dtype=np.int32))]
        chains = [Fed([0] * fed.num_computed, fed.block_ids, fed.num_computed) for fed, _ in pieces]
        rows = np.arange(len(pieces), dtype=np.int32)
        for _ in range(num_drafts - 1):
            for chain, token in zip(chains, drafted[-1].token_ids, strict=True):
                chain.tokens.append(int(token))
            batch = make_batch([(chain, 1) for chain in chains], self.next_block)
            drafted.append(self.draft.further(batch, rows))
        return [
            DraftedTokens(
                np.array([step.token_ids[index] for step in drafted]),
                np.array([step.probabilities[index] for step in drafted]),
            )
            for index in range(len(pieces))
        ]


def _split(drafted: DraftedTokens, batch: StepBatch) -> list[DraftedTokens]:
    ends = batch.query_starts[1:-1]
    parts = zip(
        np.split(drafted.token_ids, ends), np.split(drafted.probabilities, ends), strict=True
    )
    return [DraftedTokens(*part) for part in parts]


def native_drafter(model: TinyModel, head: DraftHead, **settings: object) -> DraftFeeder:
    """Return a native runner with a head."""
    return DraftFeeder(load_native(model.config, model.weights, head=head, **settings))


def torch_drafter(model: TinyModel, head: DraftHead, dtype: str = "f32") -> DraftFeeder:
    """Return a torch runner with a head."""
    return DraftFeeder(load(model.config, model.weights, dtype, head=head))
