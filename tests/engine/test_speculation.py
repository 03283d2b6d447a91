"""With drafts and without, the output is the same: every accept length, everywhere."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import lru_cache

from hypothesis import given, settings
from hypothesis import strategies as st

from support.engines import VOCAB, Answer, Collector, mock_engine, naive_answer
from support.grammar_vocabulary import (
    EOS_ID,
    GrammarVocabulary,
    grammar_compiler,
    json_grammar,
    text_of,
)
from support.oracle_drafter import OracleDrafter
from twinfire.engine.choice_grammar import ChoiceGrammar
from twinfire.engine.drafters.draft_lengths import DraftLengths
from twinfire.engine.drafters.drafter import ChoiceKey, Draft, DraftContext, Drafter
from twinfire.engine.drafters.step_costs import StepCosts
from twinfire.engine.engine import Engine
from twinfire.engine.speculator import Speculator
from twinfire.protocol.messages import Submit
from twinfire.protocol.sampling import SamplingParams
from twinfire.protocol.tokens import pack_ids

MAX_DRAFTS = 7


def always(drafter: Drafter) -> Speculator:
    """Verify every draft, whether it pays or not."""
    costs = StepCosts()
    return Speculator(
        drafter,
        MAX_DRAFTS,
        DraftLengths(costs, MAX_DRAFTS, is_adaptive=False),
        costs,
        vocab_size=VOCAB,
    )


def sampling(**kw: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "seed": 5, **kw})  # type: ignore[arg-type]


REQUESTS = st.tuples(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.builds(
        sampling,
        n=st.integers(1, 3),
        max_tokens=st.integers(1, 20),
        seed=st.integers(-(2**63), 2**63 - 1),
        temperature=st.sampled_from([0.0, 0.8]),
        top_p=st.sampled_from([1.0, 0.8]),
        min_p=st.sampled_from([0.0, 0.05]),
        eos_token_ids=st.sampled_from([(), (1, 2, 3, 4)]),
        stop_token_ids=st.sampled_from([(), (9, 10)]),
        min_tokens=st.sampled_from([0, 6]),
        bad_words=st.sampled_from([(), ((5, 6), (7,))]),
        logit_bias=st.sampled_from([(), ((8, 3.0),)]),
        frequency_penalty=st.sampled_from([0.0, 1.5]),
        repetition_penalty=st.sampled_from([1.0, 1.3]),
        logprobs=st.sampled_from([-1, 0, 3]),
        prompt_logprobs=st.sampled_from([-1, -1, 1]),
    ),
)


class Requests:
    """What was asked, and what a loop without an engine answers."""

    def __init__(self, asked: list[tuple[list[int], SamplingParams]]) -> None:
        self._asked = asked
        self.answer = lru_cache(maxsize=None)(self._answer)

    def truth(self, key: ChoiceKey) -> list[int]:
        return self.answer(key[1], key[2]).tokens

    def _answer(self, request_id: int, choice: int) -> Answer:
        return naive_answer(*self._asked[request_id], choice)


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(st.tuples(REQUESTS, st.integers(0, 6)), min_size=1, max_size=7),
    accuracy=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    num_blocks=st.sampled_from([17, 24, 200]),
    budget=st.sampled_from([8, 32]),
    prefix_cache=st.booleans(),
    num_lookahead=st.sampled_from([0, 3]),
)
def test_same_output_and_log_probabilities_at_every_accept_length(
    requests: list[tuple[tuple[list[int], SamplingParams], int]],
    accuracy: float,
    num_blocks: int,
    budget: int,
    prefix_cache: bool,
    num_lookahead: int,
) -> None:
    asked = Requests([request for request, _ in requests])
    drafter = OracleDrafter(asked.truth, accuracy)
    outputs = []
    for speculator in (None, always(drafter)):
        engine, _ = mock_engine(
            num_blocks=num_blocks,
            max_model_len=64,
            max_num_batched_tokens=budget,
            enable_prefix_cache=prefix_cache,
            speculator=speculator,
            num_lookahead_tokens=num_lookahead if speculator else 0,
        )
        collector = Collector(engine)
        for request_id, ((prompt, params), steps_before) in enumerate(requests):
            for _ in range(steps_before):
                collector.step()
                engine.check_integrity()
            collector.submit(request_id, prompt, params)
        collector.run()
        outputs.append(collector.requests)
    plain, drafted = outputs
    for request_id, ((_, params), _) in enumerate(requests):
        for choice in range(params.n):
            expected = asked.answer(request_id, choice)
            for record in (plain["g", request_id], drafted["g", request_id]):
                assert record.answers[choice].tokens == expected.tokens
                assert record.answers[choice].finish_reason == expected.finish_reason
                assert record.answers[choice].stop_token_id == expected.stop_token_id
            reports = [
                _joined(record["g", request_id].answers[choice]) for record in (plain, drafted)
            ]
            assert reports[0] == reports[1]
        assert plain["g", request_id].prompt_logprobs == drafted["g", request_id].prompt_logprobs


def _joined(answer: Answer) -> list[bytes]:
    rows = answer.logprobs
    return [
        b"".join(getattr(row, name) for row in rows)
        for name in ("token_logprobs", "ranks", "top_ids", "top_logprobs")
    ]


def drafting(
    prompt: list[int], params: SamplingParams, accuracy: float, **kw: object
) -> tuple[Engine, Collector, OracleDrafter]:
    asked = Requests([(prompt, params)])
    drafter = OracleDrafter(asked.truth, accuracy)
    engine, _ = mock_engine(speculator=always(drafter), **kw)  # type: ignore[arg-type]
    return engine, Collector(engine), drafter


def test_right_drafts_save_steps_and_are_counted_by_position():
    params = sampling(max_tokens=30)
    engine, collector, _ = drafting([1, 2, 3], params, 1.0)
    collector.submit(0, [1, 2, 3], params)
    collector.run()
    load = engine.load()
    assert load.drafted == load.accepted
    assert len(load.drafted) == MAX_DRAFTS
    assert load.drafted[0] >= load.drafted[-1]
    # Each token is drawn by a step of its own or was an accepted draft.
    assert load.step + sum(load.accepted) == 30


def test_wrong_drafts_cost_rows_and_no_token():
    params = sampling(max_tokens=30)
    engine, collector, _ = drafting([1, 2, 3], params, 0.0)
    collector.submit(0, [1, 2, 3], params)
    collector.run()
    assert sum(engine.load().drafted) > 0
    assert sum(engine.load().accepted) == 0
    assert engine.load().step == 30


def test_a_delta_says_what_was_drafted_for_it():
    params = sampling(max_tokens=30)
    engine, _, _ = drafting([1, 2, 3], params, 1.0)
    engine.submit("g", Submit(0, pack_ids([1, 2, 3]), params))
    deltas = []
    while engine.has_work:
        deltas += engine.step()["g"].deltas
    assert all(delta.drafted == delta.accepted for delta in deltas)
    assert all(len(delta.tokens) == 4 * (1 + delta.accepted) for delta in deltas)
    assert sum(delta.accepted for delta in deltas) == sum(engine.load().accepted)


def test_a_cancelled_choice_is_forgotten_and_what_it_said_is_learnt():
    params = sampling(max_tokens=60)
    engine, collector, drafter = drafting([1, 2, 3], params, 0.5)
    collector.submit(0, [1, 2, 3], params)
    for _ in range(5):
        collector.step()
    engine.cancel("g", 0)
    engine.step()
    assert not drafter.known
    output = collector.record("g", 0).answers[0].tokens
    assert drafter.outputs["g", 0, 0] == output


def test_no_draft_reaches_beyond_max_tokens():
    for max_tokens in range(1, 6):
        params = sampling(max_tokens=max_tokens)
        _, collector, _ = drafting([1, 2, 3], params, 1.0)
        collector.submit(0, [1, 2, 3], params)
        collector.run()
        answer = collector.record("g", 0).answers[0]
        assert len(answer.tokens) == max_tokens
        assert answer.finish_reason == "length"


SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "kind": {"enum": ["ab", "cd", 12]},
            "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        },
        "required": ["name", "kind", "tags"],
        "additionalProperties": False,
    }
)
GRAMMARS = grammar_compiler()


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**60),
    temperature=st.sampled_from([0.0, 0.8]),
    accuracy=st.sampled_from([0.0, 0.7, 1.0]),
    max_tokens=st.sampled_from([7, 90]),
    allowed=st.sampled_from([(), tuple(range(40))]),
)
def test_a_grammar_sees_each_draft_before_the_next_token(
    seed: int, temperature: float, accuracy: float, max_tokens: int, allowed: tuple[int, ...]
) -> None:
    params = sampling(
        seed=seed,
        temperature=temperature,
        max_tokens=max_tokens,
        n=2,
        eos_token_ids=(EOS_ID,),
        grammar=json_grammar(SCHEMA),
        allowed_token_ids=allowed,
    )
    outputs: list[dict[int, list[int]]] = []
    records = []
    for speculating in (False, True):
        drafter = OracleDrafter(lambda key: outputs[-1][key[2]], accuracy, seed)
        engine, _ = mock_engine(
            max_model_len=110,
            grammars=GRAMMARS,
            speculator=always(drafter) if speculating else None,
        )
        collector = Collector(engine)
        collector.submit(0, [3, 1, 4, 1, 5], params)
        _run_compiled(collector)
        record = collector.record("g", 0)
        outputs.append({choice: answer.tokens for choice, answer in record.answers.items()})
        records.append(record)
    plain, drafted = records
    assert (plain.rejected is None) == (drafted.rejected is None)
    if plain.rejected is None:
        assert plain.answers == drafted.answers
    assert not drafter.known or plain.rejected is not None


def _run_compiled(collector: Collector) -> None:
    """Step until all is done; grammars are compiled meanwhile."""
    deadline_s = time.monotonic() + 20
    while collector.engine.has_work:
        collector.step()
        collector.engine.check_integrity()
        assert time.monotonic() < deadline_s


class Silent:
    """Drafts nothing."""

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        return [Draft([], [], "silent") for _ in contexts]

    def ended(self, context: DraftContext) -> None:
        pass

    def forget(self, key: ChoiceKey) -> None:
        pass


def test_text_that_a_grammar_forces_is_drafted_without_a_drafter() -> None:
    params = sampling(
        max_tokens=90, temperature=0.0, eos_token_ids=(EOS_ID,), grammar=json_grammar(SCHEMA)
    )
    loads, answers = [], []
    for speculator in (None, always(Silent())):
        engine, _ = mock_engine(max_model_len=110, grammars=GRAMMARS, speculator=speculator)
        collector = Collector(engine)
        collector.submit(0, [3, 1, 4, 1, 5], params)
        _run_compiled(collector)
        answers.append(collector.record("g", 0).answers[0])
        loads.append(engine.load())
    assert answers[0] == answers[1]
    assert sum(loads[1].accepted) >= 5


def test_a_draft_is_cut_where_its_grammar_forbids_it() -> None:
    grammar = GRAMMARS.find(json_grammar(SCHEMA))
    while grammar is None:
        time.sleep(0.01)
        grammar = GRAMMARS.find(json_grammar(SCHEMA))
    choice = ChoiceGrammar(grammar, (EOS_ID,), ())
    forced = choice.fit(Draft([], [], "none"), 20)
    # The quote that ends the key may be a token with what follows it.
    assert text_of(forced.token_ids) == '{"name'
    assert forced.source == "grammar"
    vocabulary = GrammarVocabulary()
    for token_id in [*forced.token_ids, *vocabulary.encode('": '), *vocabulary.encode('"')]:
        assert choice.accept(token_id)
    (name,), (close,) = vocabulary.encode("a"), vocabulary.encode('"')
    fitted = choice.fit(Draft([name, name, close, close], [0.5] * 4, "some"), 20)
    assert fitted == Draft([name, name, close], [0.5] * 3, "some")
    assert len(choice.fit(Draft([name] * 12, [0.5] * 12, "some"), 20).token_ids) == 8
