"""What goes wrong around drafts stays there: nobody's output changes, stops or waits for it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import pytest

from support.engines import SAMPLER, VOCAB, Collector, mock_engine, naive_answer
from support.grammar_vocabulary import EOS_ID, grammar_compiler, json_grammar
from support.mock_runner import MockRunner
from support.numpy_sampling_ops import NumpySamplingOps
from support.oracle_drafter import OracleDrafter
from twinfire.artifacts.grammar_compiler import GrammarCompiler
from twinfire.engine.draft_runner import DraftedTokens
from twinfire.engine.drafters.draft_lengths import DraftLengths
from twinfire.engine.drafters.drafter import ChoiceKey, Draft, DraftContext, Drafter
from twinfire.engine.drafters.make_drafter import make_drafter
from twinfire.engine.drafters.step_costs import StepCosts
from twinfire.engine.engine import Engine
from twinfire.engine.speculator import Speculator
from twinfire.kernels.step_batch import Int32Array, StepBatch
from twinfire.protocol.messages import HandOff, Peer, Submit
from twinfire.protocol.sampling import SamplingParams
from twinfire.protocol.speculation import parse_speculation
from twinfire.protocol.tokens import pack_ids
from twinfire.scheduler.scheduler import Scheduler
from twinfire.scheduler.scheduler_config import SchedulerConfig
from twinfire.worker.speculation import build_speculator

PROMPT = [1, 2, 3]


def always(drafter: Drafter) -> Speculator:
    costs = StepCosts()
    lengths = DraftLengths(costs, 7, is_adaptive=False)
    return Speculator(drafter, 7, lengths, costs, vocab_size=VOCAB)


def oracle(requests: Sequence[tuple[list[int], SamplingParams]]) -> OracleDrafter:
    return OracleDrafter(lambda key: naive_answer(*requests[key[1]], key[2]).tokens, 1.0)


def params(max_tokens: int = 24, **fields: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=5, **fields)  # type: ignore[arg-type]


class FaultyDrafter:
    """One that breaks for some requests, and with them for all that it is asked for at once."""

    def __init__(self, drafter: Drafter, breaking: set[int]) -> None:
        self._drafter = drafter
        self._breaking = breaking
        self.num_faults = 0

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        if any(context.key[1] in self._breaking for context in contexts):
            self.num_faults += 1
            raise RuntimeError("a fault of a drafter")
        return self._drafter.propose(contexts)

    def ended(self, context: DraftContext) -> None:
        if context.key[1] in self._breaking:
            raise RuntimeError("a fault while learning")
        self._drafter.ended(context)

    def forget(self, key: ChoiceKey) -> None:
        self._drafter.forget(key)


def test_a_drafter_that_fails_costs_drafts_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    requests = [(PROMPT, params()), ([9, 8], params()), ([4, 4, 4], params())]
    drafter = FaultyDrafter(oracle(requests), {1})
    engine, _ = mock_engine(speculator=always(drafter))
    collector = Collector(engine)
    with caplog.at_level(logging.ERROR):
        for index in range(2):
            collector.submit(index, *requests[index])
        collector.run()
    assert sum(engine.load().drafted) == 0
    # Once, and not in every step.
    assert drafter.num_faults == 1
    assert "a fault of a drafter" in caplog.text
    collector.submit(2, *requests[2])
    collector.run()
    assert sum(engine.load().accepted) > 0
    for index, (prompt, sampling) in enumerate(requests):
        answer = collector.record("g", index).answers[0]
        assert answer.tokens == naive_answer(prompt, sampling, 0).tokens


def test_a_drafter_that_fails_to_learn_an_output_ends_nobody_elses() -> None:
    drafter = FaultyDrafter(oracle([(PROMPT, params())]), set())
    engine, _ = mock_engine(speculator=always(drafter))
    collector = Collector(engine)
    collector.submit(0, PROMPT, params())
    collector.step()
    collector.step()
    drafter._breaking.add(0)
    engine.cancel("g", 0)
    collector.submit(1, [9, 8], params())
    collector.run()
    assert len(collector.record("g", 1).answers[0].tokens) == 24


class BeyondVocabulary:
    """Guesses as a tokenizer may that has more tokens than the model."""

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        guesses = [self._token_ids[: context.limit] for context in contexts]
        return [Draft(guess, [0.9] * len(guess), "bad") for guess in guesses]

    def ended(self, context: DraftContext) -> None:
        pass

    def forget(self, key: ChoiceKey) -> None:
        pass


class WatchedRunner(MockRunner):
    """Knows the highest token that it was given."""

    highest = 0

    def execute(self, batch: StepBatch) -> None:
        self.highest = max(self.highest, int(batch.token_ids.max()))
        super().execute(batch)


def engine_over(
    runner: MockRunner, speculator: Speculator | None, grammars: GrammarCompiler | None = None
) -> Engine:
    runner.init_kv(64)
    return Engine(
        Scheduler(SchedulerConfig(num_blocks=64, block_size=4, max_model_len=128)),
        runner,
        SAMPLER,
        grammars=grammars,
        speculator=speculator,
    )


def test_no_draft_that_the_model_does_not_have_is_computed() -> None:
    runner = WatchedRunner(VOCAB, 4)
    collector = Collector(engine_over(runner, always(BeyondVocabulary([5, VOCAB, 6]))))
    collector.submit(0, PROMPT, params())
    collector.run()
    assert runner.highest < VOCAB
    drafted = collector.engine.load().drafted
    assert drafted[0] > 0
    assert sum(drafted[1:]) == 0


def test_a_draft_that_the_model_does_not_have_breaks_no_grammar() -> None:
    """The library takes an unknown token for a fault that it does not go on from."""
    speculator = always(BeyondVocabulary([VOCAB]))
    engine = engine_over(WatchedRunner(VOCAB, 4), speculator, grammar_compiler())
    collector = Collector(engine)
    grammar = json_grammar('{"type": "string", "minLength": 3, "maxLength": 9}')
    collector.submit(0, PROMPT, params(40, eos_token_ids=(EOS_ID,), grammar=grammar))
    collector.run(200_000)
    record = collector.record("g", 0)
    assert record.rejected is None
    assert len(record.answers[0].tokens) > 1


def test_a_prediction_of_unknown_tokens_is_left_alone() -> None:
    truth = naive_answer(PROMPT, params(), 0).tokens
    prediction = [*truth[:9], VOCAB + 7, *truth[9:]]
    runner = WatchedRunner(VOCAB, 4)
    costs = StepCosts()
    lengths = DraftLengths(costs, 7, is_adaptive=False)
    drafter = make_drafter(parse_speculation("ngram"), lengths.calibration, None)
    speculator = Speculator(drafter, 7, lengths, costs, vocab_size=VOCAB)
    collector = Collector(engine_over(runner, speculator))
    collector.submit(0, PROMPT, params(), prediction=pack_ids(prediction))
    collector.run()
    assert collector.record("g", 0).answers[0].tokens == truth
    assert runner.highest < VOCAB
    assert sum(collector.engine.load().accepted) > 10


def test_progress_of_a_prompt_never_counts_drafts() -> None:
    """The last chunk may be one token long, which is then drafted after."""
    prompt = [*range(8), *range(5)]
    sampling = params(n=2)
    engine, _ = mock_engine(
        max_num_batched_tokens=12, speculator=always(oracle([(prompt, sampling)]))
    )
    engine.submit("g", Submit(0, pack_ids(prompt), sampling))
    told: list[int] = []
    first: list[int] = []
    while engine.has_work:
        output = engine.step()["g"]
        told += [progress.num_computed_tokens for progress in output.progress]
        first += [delta.drafted for delta in output.deltas[:1] if not first]
    assert told == [12, 13]
    assert first[0] > 0


def test_a_prompt_for_another_worker_is_handed_over_without_drafts() -> None:
    prompt = [*range(8), *range(5)]
    engine, _ = mock_engine(
        max_num_batched_tokens=12, speculator=always(oracle([(prompt, params())]))
    )
    hand_off = HandOff(Peer("d", "unix:/d"))
    engine.submit("g", Submit(0, pack_ids(prompt), params(), hand_off=hand_off))
    while engine.has_work:
        engine.step()
    *announced, done = engine.take_hand_off_events()
    assert sum(engine.load().drafted) == 0
    assert done.num_prompt_blocks == -(-len(prompt) // 4)
    assert sum(len(event.block_ids) for event in announced) == done.num_prompt_blocks


def test_a_queue_that_cannot_begin_keeps_nobody_from_being_drafted_for() -> None:
    requests = [([index, 2, 3], params(30)) for index in range(1, 9)]
    costs = StepCosts()
    # Sixteen rows cost as one, and more of them cost what they compute.
    costs.calibrate(lambda rows: 0.01 * max(1.0, rows / 16), 64)
    speculator = Speculator(oracle(requests), 7, DraftLengths(costs, 7), costs, vocab_size=VOCAB)
    engine, _ = mock_engine(max_num_seqs=2, max_num_batched_tokens=64, speculator=speculator)
    collector = Collector(engine)
    for index, request in enumerate(requests):
        collector.submit(index, *request)
    collector.submit(len(requests), list(range(60)), params(1))
    for _ in range(12):
        collector.step()
    assert engine.load().waiting > 0
    assert sum(engine.load().accepted) > 30


class WrongHead:
    """A head whose drafts are never drawn; it breaks at some calls."""

    def __init__(self, breaks_at: int = -1) -> None:
        self.num_calls = 0
        self._breaks_at = breaks_at

    def first(self, batch: StepBatch, feature_rows: Int32Array) -> DraftedTokens:
        self.num_calls += 1
        if self.num_calls == self._breaks_at:
            raise RuntimeError("a fault of a head")
        return self._drafts(len(batch.logit_rows))

    def further(self, batch: StepBatch, kept_rows: Int32Array) -> DraftedTokens:
        return self._drafts(len(kept_rows))

    def _drafts(self, count: int) -> DraftedTokens:
        return DraftedTokens(np.zeros(count, np.int64), np.full(count, 0.9, np.float32))


class HeadedRunner(MockRunner):
    draft: WrongHead


def headed_engine(head: WrongHead, speculate: str) -> Engine:
    runner = HeadedRunner(VOCAB, 4)
    runner.draft = head
    runner.init_kv(64)
    options = parse_speculation(speculate)
    speculator = build_speculator(options, runner, NumpySamplingOps(), 64)
    return engine_over(runner, speculator)


def test_a_head_that_is_to_draft_always_does_so_though_it_never_pays() -> None:
    engine = headed_engine(WrongHead(), "eagle3:adaptive=false")
    collector = Collector(engine)
    collector.submit(0, PROMPT, params(100, bad_words=((0,),)))
    collector.run()
    assert engine.load().drafted[0] == 98


def test_a_head_that_fails_leaves_what_it_did_not_see_to_itself() -> None:
    engine = headed_engine(WrongHead(breaks_at=6), "eagle3:adaptive=false")
    collector = Collector(engine)
    sampling = params(20, bad_words=((0,),))
    collector.submit(0, PROMPT, sampling)
    collector.run()
    assert engine.load().drafted[0] == 5
    assert collector.record("g", 0).answers[0].tokens == naive_answer(PROMPT, sampling, 0).tokens
    collector.submit(1, [7, 7], sampling)
    collector.run()
    assert engine.load().drafted[0] == 5 + 18
