"""In float32 a row's logits are the same bits however its sequence came to be computed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.step_batches import Fed, Feeder, load
from support.tiny_models import tiny_model

NAMES = ("llama_biased", "mistral_window", "qwen3", "llama_odd_heads")
LENGTHS = (300, 61, 45, 33, 1, 270)


def sequences() -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, 131, length).tolist() for length in LENGTHS]


def feeder_of(name: str, num_threads: int) -> Feeder:
    model = tiny_model(name)
    return Feeder(load(model.config, model.weights, num_threads=num_threads), num_blocks=400)


@pytest.fixture(autouse=True)
def _restore_threads() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("name", "num_threads"), [*((name, 1) for name in NAMES), ("llama_biased", 2)]
)
def test_alone_batched_and_chunked(name: str, num_threads: int) -> None:
    feeder = feeder_of(name, num_threads)
    alone = [feeder.whole(tokens) for tokens in sequences()]
    batched = feeder.step([(Fed(tokens), len(tokens)) for tokens in sequences()])
    for one, among in zip(alone, batched, strict=True):
        np.testing.assert_array_equal(one, among)
    for one, parts in zip(alone, randomly_chunked(feeder), strict=True):
        np.testing.assert_array_equal(one, np.concatenate(parts))


def randomly_chunked(feeder: Feeder) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(7)
    feds = [Fed(tokens) for tokens in sequences()]
    rows: list[list[np.ndarray]] = [[] for _ in feds]
    while any(fed.num_computed < len(fed.tokens) for fed in feds):
        step = []
        for index, fed in enumerate(feds):
            left = len(fed.tokens) - fed.num_computed
            if left and rng.random() < 0.8:
                step.append((index, min(left, int(rng.choice([1, 1, 3, 16, 40, 130])))))
        if step:
            parts = feeder.step([(feds[index], count) for index, count in step])
            for (index, _), part in zip(step, parts, strict=True):
                rows[index].append(part)
    return rows


def test_logits_by_row_chunks_equal_logits_at_once() -> None:
    feeder = feeder_of("llama", 1)
    whole = feeder.whole(sequences()[0])
    rows = [feeder.runner.logits(row, row + 1) for row in range(0, 300, 11)]
    np.testing.assert_array_equal(np.concatenate(rows), whole[::11])
