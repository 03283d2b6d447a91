"""Logits against transformers' for tiny random checkpoints of every architecture."""

from __future__ import annotations

import numpy as np
import pytest

from support.step_batches import Fed, Feeder, load
from support.tiny_models import TINY_MODEL_NAMES, TinyModel, tiny_model

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def tokens_of(seed: int, count: int, vocab_size: int = 131) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab_size, count).tolist()


@pytest.fixture(scope="module", params=TINY_MODEL_NAMES)
def model(request: pytest.FixtureRequest) -> TinyModel:
    return tiny_model(request.param)


@pytest.fixture
def feeder(model: TinyModel) -> Feeder:
    return Feeder(load(model.config, model.weights))


@pytest.mark.parametrize("length", [1, 31, 33, 300])
def test_whole_prompt(model: TinyModel, feeder: Feeder, length: int) -> None:
    tokens = tokens_of(1, length)
    np.testing.assert_allclose(feeder.whole(tokens), model.reference_logits(tokens), **TOLERANCE)


@pytest.mark.parametrize("sizes", [[1] * 40, [32, 32, 1, 7, 64], [5, 100, 17], [255, 2]])
def test_chunked_prompt(model: TinyModel, feeder: Feeder, sizes: list[int]) -> None:
    tokens = tokens_of(2, 290)
    np.testing.assert_allclose(
        feeder.chunked(tokens, sizes), model.reference_logits(tokens), **TOLERANCE
    )


def test_cached_prefix(model: TinyModel, feeder: Feeder) -> None:
    prefix, first_tail, second_tail = tokens_of(3, 96), tokens_of(4, 20), tokens_of(5, 50)
    first = Fed(prefix + first_tail)
    feeder.step([(first, len(first.tokens))])
    second = Fed(prefix + second_tail, block_ids=first.block_ids[:3], num_computed=96)
    logits = feeder.step([(second, 50)])[0]
    expected = model.reference_logits(prefix + second_tail)[96:]
    np.testing.assert_allclose(logits, expected, **TOLERANCE)


def test_mixed_batch_equals_single_runs(model: TinyModel, feeder: Feeder) -> None:
    prefix = tokens_of(6, 64)
    decoding = Fed(tokens_of(7, 80))
    short = Fed(tokens_of(8, 4))
    warm = Fed(prefix + tokens_of(9, 8))
    feeder.step([(decoding, 79), (short, 3), (warm, 72)])
    hit = Fed(prefix + tokens_of(10, 70), block_ids=warm.block_ids[:2], num_computed=64)
    fresh = Fed(tokens_of(11, 45))
    pieces = [(fresh, 45), (decoding, 1), (hit, 70), (short, 1)]
    for (fed, count), logits in zip(pieces, feeder.step(pieces), strict=True):
        expected = model.reference_logits(fed.tokens)[-count:]
        np.testing.assert_allclose(logits, expected, **TOLERANCE)


def test_copied_tail_block(model: TinyModel, feeder: Feeder) -> None:
    prompt = tokens_of(12, 40)
    first = Fed([*prompt, 5, 6, 7])
    feeder.step([(first, 40)])
    copy = feeder.next_block[0]
    feeder.next_block[0] += 1
    fork = Fed([*prompt, 9, 8, 7], block_ids=[first.block_ids[0], copy], num_computed=40)
    pieces = [(first, 3), (fork, 3)]
    steps = feeder.step(pieces, block_copies=((first.block_ids[1], copy),))
    for (fed, count), logits in zip(pieces, steps, strict=True):
        expected = model.reference_logits(fed.tokens)[-count:]
        np.testing.assert_allclose(logits, expected, **TOLERANCE)
