from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.answer_vectors import SCHEMAS, VECTORS, Vector, answered, plan_of
from twinfire.gateway.text.answer_parts import ToolCallArguments, ToolCallStart
from twinfire.gateway.text.answer_splitter import AnswerPlan, AnswerSplitter
from twinfire.gateway.text.choice_text import ShownToken, TextDelta
from twinfire.gateway.text.hold_back import GrowingText, Markers
from twinfire.gateway.text.reasoning import REASONING_FORMATS
from twinfire.gateway.text.tool_formats.readers import READERS
from twinfire.gateway.text.tool_formats.tool_format import TOOL_FORMATS, ToolFormatName

by_name = pytest.mark.parametrize(
    "vector", VECTORS, ids=lambda vector: f"{vector.format}: {vector.name}"
)


@by_name
def test_whole(vector: Vector) -> None:
    assert answered(vector.plan, [vector.text], vector.stops) == vector.expected
    for _, arguments in vector.calls:
        if vector.stops == "stop" and "[" not in arguments:
            json.loads(arguments)


@by_name
def test_cut_at_every_character(vector: Vector) -> None:
    for cut in range(len(vector.text) + 1):
        pieces = [vector.text[:cut], vector.text[cut:]]
        assert answered(vector.plan, pieces, vector.stops) == vector.expected, pieces
    assert answered(vector.plan, list(vector.text), vector.stops) == vector.expected


@settings(deadline=None)
@given(st.data())
def test_cut_anywhere(data: st.DataObject) -> None:
    vector = data.draw(st.sampled_from(VECTORS))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(vector.text)))))
    pieces = [vector.text[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]
    assert answered(vector.plan, pieces, vector.stops) == vector.expected


MARKERS = sorted({text for each in TOOL_FORMATS.values() for text in each.markers})
PIECES = st.one_of(
    st.sampled_from(
        [
            *MARKERS,
            *("<think>", "</think>", "<function=", "<parameter=", "</parameter>", "</function>"),
            *('{"name": "get_weather", "arguments": ', '{"city": "x"}', "}", "{", '"', "\\", "]"),
            *("[", ",", ";", ":", "functions.get_weather:0", "get_weather", "```json", "\n", " "),
        ]
    ),
    st.text(max_size=4),
)


@settings(deadline=None)
@given(st.sampled_from(sorted(READERS)), st.lists(PIECES, max_size=24), st.booleans())
def test_garbage_is_never_lost_and_never_fails(
    name: ToolFormatName, pieces: list[str], inside: bool
) -> None:
    """Every word of the model is in what the client gets, whatever the model wrote."""
    plan = plan_of(name, inside_reasoning=inside)
    whole = answered(plan, ["".join(pieces)])
    assert answered(plan, pieces) == whole
    assert answered(plan, list("".join(pieces))) == whole
    shown = whole.reasoning + whole.content + "".join(map("".join, whole.calls))
    if not whole.calls and not whole.reasoning:
        kept = "".join(pieces).replace("<think>", "").replace("</think>", "")
        assert "".join(shown.split()).replace("<think>", "").replace("</think>", "") == "".join(
            kept.split()
        )


@settings(deadline=None)
@given(st.lists(st.text("ab<>", max_size=6)), st.integers(0, 9))
def test_text_without_calls_is_the_content(pieces: list[str], step: int) -> None:
    text = "".join(pieces)
    assert answered(plan_of("hermes"), pieces).content == text


@settings(deadline=None)
@given(st.lists(st.text("abc", max_size=5), max_size=8))
def test_markers_that_overlap_are_found_where_they_begin_first(pieces: list[str]) -> None:
    def found(pieces: list[str]) -> tuple[str, str]:
        growing, passed, result = GrowingText(), [], ""
        steps = growing.until(Markers("abca", "bc"), passed.append)
        for piece in [*pieces, None]:
            growing.ended = piece is None
            growing.feed(piece or "")
            try:
                next(steps)
            except StopIteration as stop:
                result = stop.value
                break
        return "".join(passed), result

    assert found(pieces) == found(["".join(pieces)])


def test_arguments_come_while_the_model_writes_them() -> None:
    splitter = AnswerSplitter(plan_of("hermes"))
    splitter.feed(TextDelta(0, '<tool_call>\n{"name": "get_weather", "arguments": '))
    (start, first) = splitter.feed(TextDelta(0, '{"ci')).parts
    assert isinstance(start, ToolCallStart)
    assert start.name == "get_weather"
    assert first == ToolCallArguments(0, '{"ci')
    assert splitter.feed(TextDelta(0, 'ty": "Par')).parts == [ToolCallArguments(0, 'ty": "Par')]


def test_content_is_held_back_no_longer_than_it_may_be_a_marker() -> None:
    splitter = AnswerSplitter(plan_of("hermes"))
    shown = [
        "".join(part.text for part in splitter.feed(TextDelta(0, character)).parts)  # type: ignore[union-attr]
        for character in "a<tool b"
    ]
    assert shown == ["a", "", "", "", "", "", "<tool", " b"]


def test_ids_are_unique_and_kimis_are_kept() -> None:
    twice = "<|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{}<|tool_call_end|>" * 2
    ids = answered(plan_of("kimi_k2"), [twice]).ids
    assert ids[0] == "functions.f:3"
    assert ids[1] != ids[0]
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 50
    ids = answered(plan_of("hermes"), [call]).ids
    assert len(set(ids)) == 50
    assert all(each.startswith("call_") for each in ids)


def test_only_one_call_where_only_one_may_be() -> None:
    plan = AnswerPlan(READERS["hermes"], SCHEMAS, one_call=True)
    call = '<tool_call>{"name": "list_files", "arguments": {}}</tool_call>'
    assert answered(plan, [call * 3]).calls == [("list_files", "{}")]


@settings(deadline=None)
@given(st.lists(st.integers(1, 7), max_size=30))
def test_reasoning_tokens_are_counted_exactly(steps: list[int]) -> None:
    """Whatever tokens come together: here a token is a character, and the end marker two."""
    texts = ["<think>", *"abc d", "</th", "ink>", *"so.", ""]
    starts = [sum(map(len, texts[:index])) for index in range(len(texts))]
    splitter = AnswerSplitter(AnswerPlan(reasoning=REASONING_FORMATS["think"]))
    position = 0
    for step in [*steps, len(texts)]:
        end = min(position + step, len(texts))
        tokens = [ShownToken(i, starts[i], None) for i in range(position, end)]
        finish = "stop" if end == len(texts) else None
        delta = splitter.feed(TextDelta(0, "".join(texts[position:end]), tokens, finish))  # type: ignore[arg-type]
        position = end
        if finish:
            break
    assert delta.num_reasoning_tokens == len("abc d")


def test_hidden_reasoning_is_counted() -> None:
    plan = AnswerPlan(reasoning=REASONING_FORMATS["think"], show_reasoning=False)
    tokens = [ShownToken(0, 0, None), ShownToken(1, 7, None), ShownToken(2, 9, None)]
    delta = AnswerSplitter(plan).feed(TextDelta(0, "<think>ab</think>c", tokens, "stop"))
    assert [part.text for part in delta.parts] == ["c"]  # type: ignore[union-attr]
    assert delta.num_reasoning_tokens == 1


def test_a_long_answer_takes_time_in_proportion() -> None:
    """A quadratic reader would need minutes for this."""
    text = '<tool_call>{"name": "f' * 4000 + "<|" * 20_000
    assert answered(plan_of("hermes"), list(text)).content == text
