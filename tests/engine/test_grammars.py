"""Outputs held to a grammar, by an engine over random logits."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import jsonschema
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.engines import Collected, Collector, mock_engine
from support.grammar_vocabulary import (
    CALL_ID,
    EOS_ID,
    GrammarVocabulary,
    grammar_compiler,
    json_grammar,
    text_of,
)
from support.two_engines import GATEWAY, TwoEngines
from twinfire.engine.engine import Engine
from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.grammar import Grammar
from twinfire.protocol.messages import Submit
from twinfire.protocol.sampling import SamplingParams
from twinfire.protocol.tokens import pack_ids

GRAMMARS = grammar_compiler()
PROMPT = [3, 1, 4, 1, 5]
PERSON = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "kind": {"enum": ["ab", "cd", 12]},
            "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
            "of": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/pair"}]},
        },
        "required": ["name", "kind", "tags", "of"],
        "additionalProperties": False,
        "$defs": {
            "pair": {
                "type": "object",
                "properties": {"x": {"type": "string", "pattern": "^[a-f]{2,5}$"}},
                "required": ["x"],
                "additionalProperties": False,
            }
        },
    }
)


def sampling(grammar: Grammar | None, **kw: object) -> SamplingParams:
    given = {"max_tokens": 90, "seed": 5, "eos_token_ids": (EOS_ID,), "grammar": grammar, **kw}
    return SamplingParams(**given)  # type: ignore[arg-type]


def engine(**kw: object) -> Engine:
    return mock_engine(grammars=GRAMMARS, **kw)[0]  # type: ignore[arg-type]


def compiled(grammar: Grammar) -> None:
    until = time.monotonic() + 30
    while GRAMMARS.find(grammar) is None:
        assert time.monotonic() < until
        time.sleep(0.001)


def run_alone(params: SamplingParams, **kw: object) -> Collected:
    collector = Collector(engine(**kw))
    collector.submit(1, PROMPT, params)
    run(collector)
    return collector.record("g", 1)


def run(collector: Collector) -> None:
    """Step until all is done; compiling takes as many steps as it takes."""
    until = time.monotonic() + 30
    while collector.engine.has_work:
        assert time.monotonic() < until
        collector.step()
        collector.engine.check_integrity()
    assert collector.engine.load().kv_blocks_used == 0


def output(record: Collected, choice: int = 0) -> str:
    assert record.rejected is None, record.rejected
    return text_of([one for one in record.answers[choice].tokens if one != EOS_ID])


@pytest.mark.parametrize("seed", range(12))
def test_an_object_of_every_kind_of_member_parses_and_validates(seed: int) -> None:
    record = run_alone(sampling(json_grammar(PERSON), seed=seed, n=3))
    for index, answer in record.answers.items():
        assert answer.finish_reason == "stop", output(record, index)
        jsonschema.validate(json.loads(output(record, index)), json.loads(PERSON))


LEAVES = st.sampled_from(
    [
        {"type": "boolean"},
        {"type": "null"},
        {"type": "integer", "minimum": -3, "maximum": 400},
        {"type": "number", "minimum": 0, "maximum": 2},
        {"type": "string", "maxLength": 6},
        {"type": "string", "minLength": 2, "maxLength": 4},
        {"type": "string", "pattern": "^[a-c]+x$"},
        {"enum": ["ab", None, 12, True]},
        {"const": {"a": [1, "b"]}},
        {"type": ["string", "null"], "maxLength": 3},
    ]
)


def objects(values: st.SearchStrategy[dict]) -> st.SearchStrategy[dict]:
    members = st.dictionaries(st.sampled_from(["a", "bc", "d"]), values, max_size=3)
    return members.flatmap(
        lambda properties: st.builds(
            lambda required: {
                "type": "object",
                "properties": properties,
                "required": required,
                "additionalProperties": False,
            },
            st.lists(st.sampled_from(sorted(properties)), unique=True)
            if properties
            else st.just([]),
        )
    )


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        objects(inner),
        st.builds(
            lambda items, least: {
                "type": "array",
                "items": items,
                "minItems": least,
                "maxItems": least + 2,
            },
            inner,
            st.integers(0, 1),
        ),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None)
@given(schema=SCHEMAS, seed=st.integers(0, 1000), temperature=st.sampled_from([0.0, 1.0, 5.0]))
def test_whatever_the_schema_the_output_is_what_it_asks_for(
    schema: dict, seed: int, temperature: float
) -> None:
    params = sampling(
        json_grammar(json.dumps(schema)), seed=seed, temperature=temperature, max_tokens=120
    )
    record = run_alone(params)
    if record.answers[0].finish_reason == "stop":
        jsonschema.validate(json.loads(output(record)), schema)
    else:
        assert record.answers[0].finish_reason == "length"
        assert len(record.answers[0].tokens) == 120


def test_any_object_ends_and_has_no_white_space_but_one_space_between_parts() -> None:
    num_ended = 0
    for seed in range(10):
        record = run_alone(sampling(json_grammar('{"type":"object"}'), seed=seed))
        text = output(record)
        outside = "".join(text.split('"')[::2])
        assert "  " not in outside
        assert "\n" not in text
        num_ended += record.answers[0].finish_reason == "stop"
    assert num_ended > 5


def test_choices_prompts_in_chunks_preemption_and_company_change_nothing() -> None:
    params = sampling(json_grammar(PERSON), n=3, seed=8, logprobs=2)
    expected = run_alone(params)
    assert run_alone(params, max_num_batched_tokens=2, max_num_seqs=2).answers == expected.answers
    crowded = engine(num_blocks=40, max_num_seqs=6)
    collector = Collector(crowded)
    for request_id in range(1, 5):
        collector.submit(request_id, PROMPT, params)
    collector.submit(9, PROMPT, sampling(None, max_tokens=40, eos_token_ids=()))
    run(collector)
    assert crowded.load().preemptions > 0
    for request_id in range(1, 5):
        assert collector.record("g", request_id).answers == expected.answers
    one_choice = run_alone(msgspec.structs.replace(params, n=1))
    assert one_choice.answers[0] == expected.answers[0]


@pytest.mark.parametrize("num_done", [1, 7, 20])
def test_a_resumed_choice_goes_on_in_its_grammar(num_done: int) -> None:
    params = sampling(json_grammar(PERSON), seed=11)
    expected = run_alone(params).answers[0]
    collector = Collector(engine())
    collector.submit(
        1, PROMPT, params, choices=(0,), outputs=(pack_ids(expected.tokens[:num_done]),)
    )
    run(collector)
    got = collector.record("g", 1).answers[0]
    assert got == replace(expected, tokens=expected.tokens[num_done:])


def test_output_that_breaks_its_grammar_is_not_resumed() -> None:
    compiled(json_grammar(PERSON))
    message = Submit(
        1, pack_ids(PROMPT), sampling(json_grammar(PERSON)), choices=(0,), outputs=(pack_ids([5]),)
    )
    with pytest.raises(InvalidRequest, match="outputs: token 5 at 0"):
        engine().submit("g", message)


@pytest.mark.parametrize("seed", range(4))
def test_a_handed_over_output_is_that_of_one_engine(seed: int) -> None:
    params = sampling(json_grammar(PERSON), n=3, seed=seed, logprobs=1)
    pair = TwoEngines(lambda: mock_engine(grammars=GRAMMARS))
    until = time.monotonic() + 30
    while not pair.submit(1, PROMPT, params):
        assert time.monotonic() < until, "the grammar is never compiled"
    while pair.prefill.has_work or pair.decode.has_work:
        pair.step()
    assert pair.collector.record(GATEWAY, 1).answers == run_alone(params).answers


def test_a_first_token_that_completes_the_output_ends_it_on_the_prefill_side() -> None:
    params = sampling(Grammar("regex", "a|b"))
    pair = TwoEngines(lambda: mock_engine(grammars=GRAMMARS))
    while not pair.submit(1, PROMPT, params):
        pass
    while pair.prefill.has_work or pair.decode.has_work:
        pair.step()
    answer = pair.collector.record(GATEWAY, 1).answers[0]
    assert (answer.finish_reason, text_of(answer.tokens)) in [("stop", "a"), ("stop", "b")]


def test_a_complete_output_ends_without_an_ending_token_even_where_ends_are_ignored() -> None:
    for ignore_eos, min_tokens in ((False, 0), (True, 0), (False, 50)):
        params = sampling(Grammar("regex", "[cd]{4}"), ignore_eos=ignore_eos, min_tokens=min_tokens)
        collector = Collector(engine())
        collector.submit(1, PROMPT, params)
        deltas = []
        while collector.engine.has_work:
            for one in collector.engine.step().values():
                deltas += one.deltas
        assert deltas[-1].finish_reason == "stop"
        assert deltas[-1].ends_with_text
        assert len(deltas) == 4


def test_ends_come_only_where_the_output_is_complete() -> None:
    stop_id = GrammarVocabulary().encode(",")[0]
    lengths = set()
    for seed in range(30):
        params = sampling(
            Grammar("regex", "(ab,?)+"), seed=seed, stop_token_ids=(stop_id,), max_tokens=60
        )
        answer = run_alone(params).answers[0]
        text = output(run_alone(params))
        assert answer.finish_reason == "stop"
        assert text.rstrip(",").endswith("b")
        lengths.add(len(answer.tokens))
    assert len(lengths) > 1


def test_minimum_tokens_hold_ends_off_where_more_can_come() -> None:
    for seed in range(10):
        answer = run_alone(sampling(Grammar("regex", "a*"), seed=seed, min_tokens=9)).answers[0]
        assert len(answer.tokens) >= 9


def test_allowed_ids_that_leave_nothing_end_the_request_with_their_name() -> None:
    allowed = tuple(GrammarVocabulary().encode("xyz"))
    record = run_alone(sampling(json_grammar(PERSON), allowed_token_ids=allowed))
    assert record.rejected is not None
    assert "allowed_token_ids" in record.rejected.message
    assert record.rejected.param == "allowed_token_ids"
    assert record.answers == {}
    pair = TwoEngines(lambda: mock_engine(grammars=GRAMMARS))
    params = sampling(json_grammar(PERSON), allowed_token_ids=allowed)
    while not pair.submit(1, PROMPT, params):
        pass
    while pair.prefill.has_work or pair.decode.has_work:
        pair.step()
    assert [ended.refusal.param for ended in pair.ended] == ["allowed_token_ids"]


def test_allowed_ids_and_grammar_hold_together() -> None:
    allowed = tuple(GrammarVocabulary().encode("abc"))
    record = run_alone(sampling(Grammar("regex", "[a-z]{5}"), allowed_token_ids=allowed))
    assert set(output(record)) <= set("abc")


def test_an_output_that_nothing_can_follow_ends_although_the_grammar_has_more() -> None:
    only_a = tuple(GrammarVocabulary().encode("a"))
    answer = run_alone(sampling(Grammar("regex", "aa(bb)?"), allowed_token_ids=only_a)).answers[0]
    assert answer.finish_reason == "stop"
    assert text_of(answer.tokens) == "aa"


def test_special_tokens_come_only_where_the_grammar_names_them() -> None:
    free = run_alone(sampling(Grammar("regex", "[^x]{30}"))).answers[0]
    assert not {CALL_ID, EOS_ID} & set(free.tokens)
    named = run_alone(sampling(Grammar("lark", f'start: <[{CALL_ID}]> "ab" <|call|>'))).answers[0]
    assert (named.tokens[0], named.tokens[-1]) == (CALL_ID, CALL_ID)


def test_a_grammar_that_cannot_be_compiled_ends_its_request_alone() -> None:
    collector = Collector(engine())
    collector.submit(2, PROMPT, sampling(None, max_tokens=3))
    assert "unclosed group" in fault_of(collector, 1, Grammar("regex", "(a"))
    assert "not JSON" in fault_of(collector, 3, json_grammar("{not json"))
    assert len(collector.record("g", 2).answers[0].tokens) == 3


def fault_of(collector: Collector, request_id: int, grammar: Grammar) -> str:
    """Return why a request is refused, at once or once its grammar turns out to be wrong."""
    try:
        collector.submit(request_id, PROMPT, sampling(grammar))
    except InvalidRequest as error:
        return error.message
    run(collector)
    rejected = collector.record("g", request_id).rejected
    assert rejected is not None
    return rejected.message


def test_a_request_is_cancelled_and_times_out_while_its_grammar_is_compiled() -> None:
    late = grammar_compiler()
    late.find = lambda grammar: None  # type: ignore[method-assign]
    now_s = [0.0]
    waiting, _ = mock_engine(grammars=late)
    waiting._clock = lambda: now_s[0]
    collector = Collector(waiting)
    params = sampling(json_grammar(PERSON))
    collector.submit(1, PROMPT, params)
    collector.submit(2, PROMPT, params, timeout_s=5.0)
    collector.submit(3, PROMPT, params, gateway="h")
    collector.step()
    assert waiting.load().waiting == 3
    waiting.cancel("g", 1)
    waiting.cancel_gateway("h")
    waiting.check_integrity()
    now_s[0] = 6.0
    collector.step()
    assert collector.record("g", 2).answers[0].finish_reason == "timeout"
    assert not waiting.has_work


def test_an_engine_without_grammars_says_so() -> None:
    with pytest.raises(InvalidRequest, match="no grammars"):
        mock_engine()[0].submit("g", Submit(1, pack_ids(PROMPT), sampling(json_grammar("{}"))))
