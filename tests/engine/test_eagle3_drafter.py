"""A head that follows its target drafts what it would after computing the whole text at once.

On the native kernels both are the same to the bit, so one row of the head's KV that was left from
a rejected draft, a wrong next token at a chunk's end, or a block that was shared, copied or lost in
another state than the target's changes a probability here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest

from support.engines import Collector
from support.native_runners import load_native
from support.oracle_drafter import OracleDrafter
from support.random_heads import random_head
from support.tiny_models import TinyModel, tiny_model
from twinfire.engine.drafters.draft_lengths import DraftLengths
from twinfire.engine.drafters.drafter import ChoiceKey, Draft, DraftContext
from twinfire.engine.drafters.eagle3 import Eagle3Drafter
from twinfire.engine.drafters.step_costs import StepCosts
from twinfire.engine.engine import Engine
from twinfire.engine.native_runner import NativeRunner
from twinfire.engine.sampler import Sampler
from twinfire.engine.speculator import Speculator
from twinfire.kernels.cpu.native_sampling import NativeSamplingOps
from twinfire.protocol.sampling import SamplingParams
from twinfire.scheduler.scheduler import Scheduler
from twinfire.scheduler.scheduler_config import SchedulerConfig

NUM_DRAFTS = 4
VOCAB = 131
Chain = tuple[list[int], list[float]]


@cache
def model() -> TinyModel:
    return tiny_model("llama")


@cache
def runner() -> NativeRunner:
    """A target with a head; engines take turns with it."""
    loaded = load_native(model().config, model().weights, head=random_head("plain"))
    loaded.init_kv(64)
    return loaded


class ObservedHead:
    """Notes the head's chain for every text, and proposes what somebody else drafts."""

    def __init__(self, head: Eagle3Drafter, other: OracleDrafter) -> None:
        self.chains: dict[tuple[int, ...], Chain] = {}
        self._head = head
        self._other = other

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        for context, draft in zip(contexts, self._head.propose(contexts), strict=True):
            if draft.token_ids:
                chain = draft.token_ids, draft.confidences
                self.chains[tuple(context.tokens)] = chain
        return self._other.propose(contexts)

    def ended(self, context: DraftContext) -> None:
        self._head.ended(context)
        self._other.ended(context)

    def forget(self, key: ChoiceKey) -> None:
        self._head.forget(key)
        self._other.forget(key)


def observed(
    truth: dict[ChoiceKey, list[int]], accuracy: float, **limits: int
) -> tuple[Engine, ObservedHead]:
    """An engine over empty blocks whose drafts are right as often as `accuracy` says."""
    assert runner().draft is not None
    head = Eagle3Drafter(runner().draft, 32, NUM_DRAFTS)
    watched = ObservedHead(head, OracleDrafter(truth.__getitem__, accuracy))
    costs = StepCosts()
    lengths = DraftLengths(costs, 8, is_adaptive=False)
    settings = {
        "num_blocks": 64,
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "num_lookahead_tokens": NUM_DRAFTS,
        **limits,
    }
    engine = Engine(
        Scheduler(SchedulerConfig(**settings)),  # type: ignore[arg-type]
        runner(),
        Sampler(NativeSamplingOps()),
        speculator=Speculator(watched, 8, lengths, costs, head, vocab_size=VOCAB),
    )
    return engine, watched


def sampling(**kw: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 40, "seed": 3, "temperature": 0.0, **kw})  # type: ignore[arg-type]


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def plain_outputs(
    asked: Sequence[tuple[list[int], SamplingParams]],
) -> dict[ChoiceKey, list[int]]:
    engine = Engine(
        Scheduler(SchedulerConfig(num_blocks=64, max_model_len=256, max_num_batched_tokens=256)),
        runner(),
        Sampler(NativeSamplingOps()),
    )
    collector = Collector(engine)
    for index, (tokens, params) in enumerate(asked):
        collector.submit(index, tokens, params)
    collector.run()
    return {
        ("g", index, choice): answer.tokens
        for index in range(len(asked))
        for choice, answer in collector.record("g", index).answers.items()
    }


def chain_from_scratch(text: tuple[int, ...]) -> Chain:
    """The chain after a text whose last token was just drawn, all before it being its prompt."""
    engine, watched = observed({("g", 0, 0): []}, 0.0)
    collector = Collector(engine)
    drawn = SamplingParams(max_tokens=9, seed=0, allowed_token_ids=(text[-1],))
    collector.submit(0, list(text[:-1]), drawn)
    collector.step()
    collector.step()
    return watched.chains[text]


def assert_chains_are_those_from_scratch(watched: ObservedHead) -> None:
    assert len(watched.chains) >= 10
    for text, (token_ids, probabilities) in list(watched.chains.items())[::2]:
        expected = chain_from_scratch(text)
        # A chain may end early, where a block's room or the output does.
        count = min(len(token_ids), len(expected[0]))
        token_ids, probabilities = token_ids[:count], probabilities[:count]
        assert token_ids == expected[0][:count], f"after {len(text)} tokens"
        assert probabilities == expected[1][:count], f"after {len(text)} tokens"


@pytest.mark.parametrize("accuracy", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("budget", [7, 256])
def test_chunks_and_every_accept_length(accuracy: float, budget: int) -> None:
    asked = [(prompt(1, 70), sampling()), (prompt(2, 33), sampling(temperature=0.8))]
    truth = plain_outputs(asked)
    engine, watched = observed(truth, accuracy, max_num_batched_tokens=budget + 2, max_num_seqs=2)
    collector = Collector(engine)
    for index, (tokens, params) in enumerate(asked):
        collector.submit(index, tokens, params)
    collector.run()
    for index in range(len(asked)):
        assert collector.record("g", index).answers[0].tokens == truth["g", index, 0]
    assert_chains_are_those_from_scratch(watched)


def test_a_second_turn_over_cached_blocks() -> None:
    first = (prompt(4, 80), sampling(max_tokens=30))
    truth = plain_outputs([first])
    second = ([*first[0], *truth["g", 0, 0], *prompt(5, 12)], sampling(max_tokens=20))
    truth = plain_outputs([first, second])
    engine, watched = observed(truth, 0.7)
    collector = Collector(engine)
    collector.submit(0, *first)
    collector.run()
    collector.submit(1, *second)
    collector.run()
    assert collector.record("g", 1).cached_tokens == 96
    assert_chains_are_those_from_scratch(watched)


def test_preemption_and_resumption() -> None:
    asked = [(prompt(seed, 40), sampling(max_tokens=60)) for seed in range(6, 10)]
    truth = plain_outputs(asked)
    engine, watched = observed(truth, 0.7, num_blocks=9)
    collector = Collector(engine)
    for index, (tokens, params) in enumerate(asked):
        collector.submit(index, tokens, params)
    collector.run()
    assert engine.load().preemptions > 0
    for index in range(len(asked)):
        assert collector.record("g", index).answers[0].tokens == truth["g", index, 0]
    assert_chains_are_those_from_scratch(watched)


def test_a_sequence_that_the_head_did_not_see_is_not_drafted_for() -> None:
    assert runner().draft is not None
    tokens = prompt(11, 20)
    engine, watched = observed({("g", 0, 0): []}, 0.0)
    collector = Collector(engine)
    collector.submit(0, tokens, sampling())
    collector.step()
    collector.step()
    head = watched._head
    scheduler = engine._scheduler
    plan = scheduler.schedule()
    head.skip(plan)
    scheduler.commit(plan, {})
    context = DraftContext(("g", 0, 0), plan.slices[0].sequence.tokens, 20, limit=4)
    assert head.propose([context])[0].token_ids == []
    head.forget(context.key)
