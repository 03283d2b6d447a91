"""Engines with a latent draft head on torch: the bits of one that drafts nothing."""

from __future__ import annotations

from functools import cache

import pytest

from support.engines import Collected, Collector
from support.hand_off_answers import asked, assert_same, handed_over, one_by_one
from support.latent_heads import latent_head
from support.step_batches import load
from support.tiny_models import TinyModel, tiny_model
from support.two_engines import GATEWAY, CountedRunner, TwoEngines, real_engine
from twinfire.engine.engine import Engine
from twinfire.kernels.torch.sampling import TorchSamplingOps

EAGLE3 = "eagle3:adaptive=false"
HYBRID = "hybrid:adaptive=false"
HEADS = ("kimi_3_1", "two_layers", "last_hidden")


@cache
def model() -> TinyModel:
    return tiny_model("llama")


def make(head: str = "", speculate: str = "off", **limits: int) -> tuple[Engine, CountedRunner]:
    opened = latent_head(head) if head else None
    runner = load(model().config, model().weights, head=opened)
    return real_engine(runner, TorchSamplingOps(), speculate=speculate, **limits)


@cache
def plain() -> list[Collected]:
    """What one engine without drafts says."""
    return one_by_one(make()[0], asked())


@pytest.mark.parametrize("speculate", [EAGLE3, HYBRID])
@pytest.mark.parametrize("head", HEADS)
def test_drafts_change_nothing_alone_together_and_again(head: str, speculate: str) -> None:
    engine, runner = make(head, speculate)
    for got, expected in zip(one_by_one(engine, asked()), plain(), strict=True):
        assert_same(got, expected)
    num_computed = runner.num_tokens_computed
    # Together, of prompts whose blocks are cached by now.
    collector = Collector(engine)
    for index, (prompt, params) in enumerate(asked()):
        collector.submit(index, prompt, params)
    collector.run()
    hits = 0
    for index, expected in enumerate(plain()):
        got = collector.record(GATEWAY, index)
        assert_same(got, expected)
        hits += got.cached_tokens or 0
    assert hits > 0
    assert runner.num_tokens_computed - num_computed < num_computed
    assert sum(engine.load().drafted) > 0
    assert sum(engine.load().accepted) > 0 or speculate == EAGLE3


@pytest.mark.parametrize("speculate", [EAGLE3, HYBRID])
def test_preempted_streams_keep_their_bits(speculate: str) -> None:
    requests = [((prompt * 2)[:60], params) for prompt, params in asked()[:4]]
    expected = one_by_one(make()[0], requests)
    engine, _ = make("kimi", speculate, num_blocks=7, max_model_len=128)
    collector = Collector(engine)
    for index, (prompt, params) in enumerate(requests):
        collector.submit(index, prompt, params)
    collector.run()
    for index, record in enumerate(expected):
        assert_same(collector.record(GATEWAY, index), record)
    assert engine.load().preemptions > 0
    assert sum(engine.load().drafted) > 0


@pytest.mark.parametrize("head", HEADS)
def test_drafts_behind_a_hand_off_change_nothing(head: str) -> None:
    pair = TwoEngines(lambda: make(head, HYBRID))
    # The second time prefixes are cached on both sides, and outputs have been seen.
    answers = handed_over(pair, asked()) + handed_over(pair, asked(), 100)
    for got, expected in zip(answers, 2 * plain(), strict=True):
        assert_same(got, expected)
    assert sum(pair.decode.load().drafted) > 0
    assert pair.num_blocks_moved > 0


@pytest.mark.parametrize("with_head", ["prefill", "decode"])
def test_a_latent_head_on_one_side_alone_changes_nothing(with_head: str) -> None:
    heads = iter(("kimi", "") if with_head == "prefill" else ("", "kimi"))
    methods = {"kimi": HYBRID, "": "suffix:adaptive=false"}
    drafts = ("the head", "") if with_head == "prefill" else ("", "the head")

    def side() -> tuple[Engine, CountedRunner]:
        head = next(heads)
        return make(head, methods[head])

    pair = TwoEngines(side, drafts)
    for got, expected in zip(handed_over(pair, asked()), plain(), strict=True):
        assert_same(got, expected)
