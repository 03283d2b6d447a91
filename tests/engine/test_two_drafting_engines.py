"""Drafts on both sides of a hand-off: what is said has the bits of one engine without drafts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest

from support.engines import Collected, Collector
from support.hand_off_answers import Asked, asked, assert_same, handed_over, one_by_one
from support.native_runners import load_native
from support.random_heads import random_head
from support.tiny_models import TinyModel, tiny_model
from support.two_engines import GATEWAY, CountedRunner, TwoEngines, real_engine
from twinfire.engine.engine import Engine
from twinfire.kernels.cpu.native_sampling import NativeSamplingOps
from twinfire.protocol.tokens import pack_ids

SUFFIX = "suffix:adaptive=false"
EAGLE3 = "eagle3:adaptive=false"
HYBRID = "hybrid:adaptive=false"
METHODS = (SUFFIX, EAGLE3, HYBRID, "hybrid")


@cache
def model() -> TinyModel:
    return tiny_model("llama")


def make(
    speculate: str = "off", kv_dtype: str = "bf16", **limits: int
) -> tuple[Engine, CountedRunner]:
    head = random_head("plain") if speculate.startswith(("eagle3", "hybrid")) else None
    runner = load_native(model().config, model().weights, kv_dtype=kv_dtype, head=head)
    return real_engine(runner, NativeSamplingOps(), speculate=speculate, **limits)


def alone(requests: Sequence[Asked], **more: object) -> list[Collected]:
    """What one engine without drafts says."""
    engine, _ = make(**more)  # type: ignore[arg-type]
    return one_by_one(engine, requests)


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
@pytest.mark.parametrize("speculate", METHODS)
def test_drafts_behind_a_hand_off_change_nothing(speculate: str, kv_dtype: str) -> None:
    requests = asked()
    pair = TwoEngines(lambda: make(speculate, kv_dtype))
    # The second time prefixes are cached on both sides, and outputs have been seen.
    answers = handed_over(pair, requests) + handed_over(pair, requests, 100)
    for got, expected in zip(answers, 2 * alone(requests, kv_dtype=kv_dtype), strict=True):
        assert_same(got, expected)
    load = pair.decode.load()
    assert sum(load.drafted) > 0
    if speculate != EAGLE3:
        assert sum(load.accepted) > 0
    assert sum(pair.prefill.load().drafted) == 0


@pytest.mark.parametrize("speculate", METHODS)
def test_drafting_streams_preempted_on_the_decode_side_keep_their_bits(speculate: str) -> None:
    every = asked()
    requests = [((prompt * 2)[:60], params) for prompt, params in (every[0], every[2], every[3])]
    # Room for the prompts, not for what they grow into.
    limits = {"num_blocks": 7, "max_model_len": 128}
    pair = TwoEngines(lambda: make(speculate, **limits))
    for got, expected in zip(handed_over(pair, requests), alone(requests), strict=True):
        assert_same(got, expected)
    assert pair.decode.load().preemptions > 0


@pytest.mark.parametrize("speculate", METHODS)
def test_a_stream_goes_on_at_any_token_on_a_worker_that_drafts(speculate: str) -> None:
    """As after the loss of a worker: the next one gets the ids that the client has."""
    engine, _ = make(speculate)
    draws = np.random.default_rng(3)
    for index, ((prompt, params), whole) in enumerate(zip(asked(), alone(asked()), strict=True)):
        cuts = {
            choice: int(draws.integers(0, len(answer.tokens)))
            for choice, answer in whole.answers.items()
        }
        collector = Collector(engine)
        outputs = tuple(pack_ids(whole.answers[one].tokens[:cut]) for one, cut in cuts.items())
        collector.submit(index, prompt, params, choices=tuple(cuts), outputs=outputs)
        collector.run()
        for choice, got in collector.record(GATEWAY, index).answers.items():
            expected = whole.answers[choice]
            assert got.tokens == expected.tokens[cuts[choice] :]
            assert (got.finish_reason, got.stop_token_id) == (
                expected.finish_reason,
                expected.stop_token_id,
            )


@pytest.mark.parametrize("with_head", ["prefill", "decode"])
def test_a_head_on_one_side_alone_changes_nothing(with_head: str) -> None:
    """The decode side drafts for what came without the head's blocks by what it has read alone."""
    requests = asked()
    methods = iter((HYBRID, SUFFIX) if with_head == "prefill" else (SUFFIX, HYBRID))
    drafts = ("the head", "") if with_head == "prefill" else ("", "the head")
    pair = TwoEngines(lambda: make(next(methods)), drafts)
    answers = handed_over(pair, requests) + handed_over(pair, requests, 100)
    for got, expected in zip(answers, 2 * alone(requests), strict=True):
        assert_same(got, expected)
    assert sum(pair.decode.load().accepted) > 0


def test_a_head_that_saw_no_prompts_is_not_asked() -> None:
    methods = iter((SUFFIX, EAGLE3))
    pair = TwoEngines(lambda: make(next(methods)), ("", "the head"))
    for got, expected in zip(handed_over(pair, asked()), alone(asked()), strict=True):
        assert_same(got, expected)
    assert sum(pair.decode.load().drafted) == 0
    # For what is computed here from its first token on, it drafts.
    prompt, params = asked()[0]
    Collector(pair.decode).submit(1, prompt[:20], params)
    while pair.decode.has_work:
        pair.decode.step()
    assert sum(pair.decode.load().drafted) > 0
