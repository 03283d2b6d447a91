"""What a head drafts from, taken out of one runner and put into another: the same drafts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from support.draft_feeder import DraftFeeder, native_drafter, torch_drafter
from support.random_heads import VARIANTS, random_head
from support.step_batches import Fed, make_batch
from support.tiny_models import TinyModel, tiny_model, tokens_of
from support.wire_blocks import exported
from twinfire.engine.draft_runner import DraftedTokens
from twinfire.kernels.step_batch import StepBatch

MAKERS = {"native": native_drafter, "torch": torch_drafter}
LENGTHS = (1, 20, 32, 71)


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return tiny_model("llama")


def computed(feeder: DraftFeeder) -> tuple[list[Fed], StepBatch]:
    feeds = [Fed(tokens_of(length, length + 1)) for length in LENGTHS]
    return feeds, feeder.execute([(fed, len(fed.tokens) - 1) for fed in feeds])


def last_rows_of(feeds: list[Fed], feeder: DraftFeeder) -> StepBatch:
    """The rows of the head at the last computed token of each sequence."""
    ends = [
        Fed([0] * (fed.num_computed - 1) + fed.tokens[-1:], fed.block_ids, fed.num_computed - 1)
        for fed in feeds
    ]
    return make_batch([(end, 1) for end in ends], feeder.next_block)


def chain(feeder: DraftFeeder, feeds: list[Fed], drafted: DraftedTokens) -> list[DraftedTokens]:
    """Three more drafts after those."""
    chains = [Fed([0] * fed.num_computed, fed.block_ids, fed.num_computed) for fed in feeds]
    steps = [drafted]
    for _ in range(3):
        for one, token in zip(chains, steps[-1].token_ids, strict=True):
            one.tokens.append(int(token))
        batch = make_batch([(one, 1) for one in chains], feeder.next_block)
        steps.append(feeder.draft.further(batch, np.arange(len(chains), dtype=np.int32)))
    return steps


def assert_same(got: list[DraftedTokens], expected: list[DraftedTokens], tolerance: float) -> None:
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_allclose(one.probabilities, other.probabilities, rtol=tolerance)


@pytest.mark.parametrize("backend", MAKERS)
@pytest.mark.parametrize("name", VARIANTS)
def test_another_runner_drafts_the_same_from_them(
    model: TinyModel, name: str, backend: str
) -> None:
    head = random_head(name)
    source, other = (MAKERS[backend](model, head) for _ in range(2))
    feeds, batch = computed(source)
    last_rows = batch.query_starts[1:] - 1
    fused = source.draft.fused_rows(last_rows.astype(np.int32))
    assert fused.shape == (len(LENGTHS), source.draft.fused_width)
    assert fused.dtype == np.float32
    rows = np.arange(batch.num_tokens, dtype=np.int32)
    drafted = source.draft.first(replace(batch, logit_rows=last_rows), rows)
    ids = [block for fed in feeds for block in fed.block_ids]
    other.next_block = list(source.next_block)
    other.runner.import_blocks(ids, exported(source.runner, ids))
    expected = chain(source, feeds, drafted)
    got = chain(other, feeds, other.draft.first_from(last_rows_of(feeds, other), fused))
    if backend == "torch" or head.config.uses_features:
        assert_same(got, expected, 0)
    else:
        # A head without fc has its rows rounded to bf16 on their way out of native programs.
        assert_same(got[:1], expected[:1], 0.1)


@pytest.mark.parametrize("backend", MAKERS)
def test_more_rows_than_ever_before_and_then_fewer(model: TinyModel, backend: str) -> None:
    feeder = MAKERS[backend](model, random_head("plain"))
    feeds = [Fed(tokens_of(seed, 6)) for seed in range(23)]
    batch = feeder.execute([(fed, 5) for fed in feeds])
    fused = feeder.draft.fused_rows((batch.query_starts[1:] - 1).astype(np.int32))
    rows = np.arange(batch.num_tokens, dtype=np.int32)
    expected = feeder.draft.first(replace(batch, logit_rows=batch.query_starts[1:] - 1), rows)
    for start, stop in ((0, 2), (0, 23), (20, 23)):
        got = feeder.draft.first_from(last_rows_of(feeds[start:stop], feeder), fused[start:stop])
        np.testing.assert_array_equal(got.token_ids, expected.token_ids[start:stop])
        np.testing.assert_array_equal(got.probabilities, expected.probabilities[start:stop])


@pytest.mark.parametrize("backend", MAKERS)
def test_rows_that_are_none_and_rows_that_do_not_fit(model: TinyModel, backend: str) -> None:
    feeder = MAKERS[backend](model, random_head("plain"))
    feeds, batch = computed(feeder)
    for row in (-1, batch.num_tokens):
        with pytest.raises(ValueError, match="kept row"):
            feeder.draft.fused_rows(np.array([row], np.int32))
    fused = feeder.draft.fused_rows(np.arange(len(LENGTHS), dtype=np.int32))
    step = last_rows_of(feeds, feeder)
    for wrong in (fused[:-1], fused[:, :-1], np.zeros((0, 48), np.float32)):
        with pytest.raises(ValueError, match="fused rows"):
            feeder.draft.first_from(step, wrong)
