"""Fields that say what an output must look like, as grammars over a vocabulary of bytes."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.byte_tokenizer import START_ID, VOCAB_SIZE, ByteTokenizer
from twinfire.artifacts.token_grammar import TokenGrammar
from twinfire.gateway.dialects.grammar_faults import check_size, grammar_fault
from twinfire.gateway.dialects.output_grammar import response_grammar, tool_grammar
from twinfire.gateway.dialects.requests import ChatRequest
from twinfire.gateway.dialects.tool_grammar import MAX_PARALLEL_CALLS, PLAIN_SYNTAX
from twinfire.gateway.hosted_model import ReadyModel
from twinfire.gateway.settings import RequestLimits
from twinfire.gateway.text.tool_formats.tool_format import (
    HERMES,
    KIMI_K2,
    TOOL_FORMATS,
    CallSyntax,
    ToolFormat,
)
from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.grammar import Grammar

TOKENS = TokenGrammar(ByteTokenizer(), VOCAB_SIZE)
MODEL = cast(ReadyModel, SimpleNamespace(text=SimpleNamespace(tokenizer=ByteTokenizer())))
PAIR = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}


def grammar_of(**fields: object) -> Grammar:
    grammar = response_grammar(ChatRequest(messages=[], **fields), MODEL)  # type: ignore[arg-type]
    assert grammar is not None
    return grammar


def matches(grammar: Grammar, text: str | list[int]) -> bool:
    """Whether the whole text is an output that the grammar lets end."""
    ids = array("I", text) if isinstance(text, list) else ByteTokenizer().encode(text, False)
    matcher = TOKENS.compile(grammar).matcher()
    return all(matcher.accept(token_id) for token_id in ids) and matcher.may_end


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": PAIR}}},
        {"response_format": {"type": "json_schema", "json_schema": PAIR}},
        {"response_format": {"type": "json_schema", "name": "x", "schema": PAIR}},
        {"structured_outputs": {"json": PAIR}},
        {"structured_outputs": {"json": json.dumps(PAIR), "regex": None}},
        {"guided_json": PAIR},
        {"guided_json": json.dumps(PAIR), "response_format": {"type": "text"}},
    ],
)
def test_schemas_in_every_envelope(fields: Mapping[str, object]) -> None:
    grammar = grammar_of(**fields)
    assert matches(grammar, '{"a": 1}')
    assert matches(grammar, '{"a":1}')
    assert not matches(grammar, '{"a": "1"}')
    assert not matches(grammar, '{"a":  1}')
    assert not matches(grammar, '{"a": 1} ')


@pytest.mark.parametrize(
    "fields",
    [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}],
)
def test_any_object(fields: Mapping[str, object]) -> None:
    grammar = grammar_of(**fields)
    assert matches(grammar, '{"a": [1, {"b": null}], "c": "é\\n"}')
    assert not matches(grammar, "[1]")
    assert not matches(grammar, '{"a": 1')


def test_regular_expressions_match_the_whole_output() -> None:
    for grammar in (
        grammar_of(guided_regex="[ab]+c"),
        grammar_of(structured_outputs={"regex": "^[ab]+c$"}),
    ):
        assert matches(grammar, "abc")
        assert not matches(grammar, "abcd")
        assert not matches(grammar, "xabc")


TEXTS = st.text(st.characters(blacklist_categories=["Cs"]), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(choices=st.lists(TEXTS, min_size=1, max_size=4, unique=True), other=TEXTS)
def test_choices_are_taken_to_the_letter(choices: list[str], other: str) -> None:
    grammar = grammar_of(guided_choice=choices)
    assert all(matches(grammar, choice) for choice in choices)
    assert matches(grammar, other) == (other in choices)


@pytest.mark.parametrize(
    "text",
    [
        'root ::= "select " column ("," column)*\ncolumn ::= "é"\n  | [a-z_]+\n',
        '# which columns\nroot ::= "select " column ("," column)*\ncolumn ::= "\\u00e9" | [a-z_]+',
        'start: "select " column ("," column)*\ncolumn: "é" | /[a-z_]+/\n',
    ],
)
def test_grammars_as_llama_cpp_or_lark_write_them(text: str) -> None:
    for grammar in (
        grammar_of(guided_grammar=text),
        grammar_of(structured_outputs={"grammar": text}),
    ):
        assert matches(grammar, "select ab,é")
        assert not matches(grammar, "select ")
        assert not matches(grammar, "select A")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "text"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": 3}},
            "response_format.json_schema",
        ),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json_object": "yes"}}, "structured_outputs.json_object"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice"),
        ({"guided_choice": "ab"}, "guided_choice"),
        ({"guided_grammar": "root ::= nothing"}, "guided_grammar"),
        ({"guided_grammar": 'root ::= "a'}, "guided_grammar"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ],
)
def test_wrong_fields_are_named(fields: Mapping[str, object], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        grammar_of(**fields)
    assert caught.value.param == param


def inside(schema: object) -> dict[str, object]:
    return {
        "type": "object",
        "properties": {"x": {"type": "array", "items": {"anyOf": [{"type": "null"}, schema]}}},
    }


INSIDE = "$.properties.x.items.anyOf[1]"


@pytest.mark.parametrize(
    ("schema", "feature"),
    [
        ({"not": {"type": "string"}}, "`not`"),
        ({"if": {}, "then": {}}, "`if`, `then`"),
        ({"type": "array", "uniqueItems": True}, "`uniqueItems`"),
        ({"type": "array", "contains": {}}, "`contains`"),
        ({"type": "object", "propertyNames": {"pattern": "a"}}, "`propertyNames`"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "`dependentRequired`"),
        ({"type": "object", "unevaluatedProperties": False}, "`unevaluatedProperties`"),
        ({"type": "string", "format": "regex"}, "`format` regex"),
        ({"oneOf": [{"type": "string"}, {"minLength": 2}]}, "`oneOf`"),
        ({"type": "strng"}, "strng"),
        ({"type": "string", "pattern": "(?=a)"}, "look-around"),
        ({"$ref": "http://example.com/schema"}, "http://example.com/schema"),
    ],
)
def test_what_a_schema_asks_for_in_vain_is_named_with_its_place(
    schema: dict[str, object], feature: str
) -> None:
    for whole, place in ((inside(schema), INSIDE), (schema, "$")):
        fault = grammar_fault(grammar_of(guided_json=whole), "guided_json")
        assert fault is not None
        assert feature in fault.message
        assert f"`{place}`" in fault.message
        assert fault.param == "guided_json"


def test_a_schema_that_nothing_satisfies_is_refused() -> None:
    schema = {
        "type": "object",
        "properties": {"x": {"type": "integer", "minimum": 3, "maximum": 2}},
    }
    fault = grammar_fault(grammar_of(guided_json={**schema, "required": ["x"]}), "guided_json")
    assert fault is not None
    assert "required property 'x' is unsatisfiable" in fault.message


def test_the_place_of_a_fault_may_be_a_definition() -> None:
    schema = {
        "$defs": {
            "p": {"type": "object", "properties": {"u": {"type": "array", "uniqueItems": True}}}
        },
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/p"}},
    }
    fault = grammar_fault(grammar_of(guided_json=schema), "guided_json")
    assert fault is not None
    assert "`uniqueItems`" in fault.message


def test_a_grammar_may_be_neither_too_long_nor_too_deep() -> None:
    limits = RequestLimits(max_grammar_chars=300, max_grammar_depth=10)
    deep: dict[str, object] = {}
    for _ in range(6):
        deep = {"items": deep}
    check_size(grammar_of(guided_json=deep), limits, "guided_json")
    with pytest.raises(InvalidRequest, match="12 deep; the limit is 10"):
        check_size(
            grammar_of(guided_json={"a": {"b": {"c": {"d": {"e": deep}}}}}), limits, "guided_json"
        )
    check_size(grammar_of(guided_regex=r'["(]' * 11), limits, "guided_regex")
    with pytest.raises(InvalidRequest, match="400 characters; the limit is 300"):
        check_size(grammar_of(guided_regex="a" * 400), limits, "guided_regex")


@dataclass
class Tool:
    name: str
    parameters: Mapping[str, object] | None = None


TOOLS = [Tool("get_weather", PAIR), Tool("stop")]


def written(syntax: CallSyntax, *calls: tuple[str, str]) -> str:
    pieces = [
        syntax.before_name
        + name
        + (f":{number}" if syntax.numbered else "")
        + syntax.before_arguments
        + arguments
        + syntax.after_arguments
        for number, (name, arguments) in enumerate(calls)
    ]
    return syntax.opens + syntax.separator.join(pieces) + syntax.closes


@pytest.mark.parametrize("name", ["plain", *TOOL_FORMATS])
def test_calls_in_every_form(name: str) -> None:
    tool_format = cast("ToolFormat | None", TOOL_FORMATS.get(name))  # type: ignore[call-overload]
    syntax = tool_format.syntax if tool_format else PLAIN_SYNTAX
    one, other = ("get_weather", '{"a": 1}'), ("stop", '{"any": [null]}')
    several = tool_grammar(tool_format, TOOLS, None, True, MODEL)
    assert grammar_fault(several, "tools") is None
    for calls in ((one,), (other,), (one, other, one), (one,) * MAX_PARALLEL_CALLS):
        assert matches(several, written(syntax, *calls))
    assert not matches(several, written(syntax, *(one,) * (MAX_PARALLEL_CALLS + 1)))
    assert not matches(several, "")
    assert not matches(several, written(syntax, ("get_weather", '{"b": 1}')))
    assert not matches(several, written(syntax, ("get_weather", '{"a": 1, "b": 2}')))
    assert not matches(several, written(syntax, ("unknown", "{}")))
    single = tool_grammar(tool_format, TOOLS, None, False, MODEL)
    assert matches(single, written(syntax, other))
    assert not matches(single, written(syntax, one, other))
    named = tool_grammar(tool_format, TOOLS, "stop", True, MODEL)
    assert matches(named, written(syntax, other))
    assert not matches(named, written(syntax, one))
    assert not matches(named, written(syntax, other, other))


def test_markers_that_are_tokens_are_asked_for_as_tokens() -> None:
    form = ToolFormat(
        "hermes", CallSyntax('<|start|>{"name": "', '", "arguments": ', "}"), ("<|start|>", "</x>")
    )
    grammar = tool_grammar(form, [Tool("f")], None, False, MODEL)
    rest = list(b'{"name": "f", "arguments": {}}')
    assert matches(grammar, [START_ID, *rest])
    assert not matches(grammar, [*b"<|start|>", *rest])


def test_a_tool_schema_that_cannot_be_enforced_is_named() -> None:
    tools = [Tool("good", PAIR), Tool("bad", inside({"not": {}}))]
    fault = grammar_fault(tool_grammar(KIMI_K2, tools, None, True, MODEL), "tools")
    assert fault is not None
    assert "`bad`" in fault.message
    assert "`not`" in fault.message
    assert INSIDE in fault.message


def test_formats_that_only_annotate_do_not_keep_a_tool_from_being_called() -> None:
    schema = {
        "type": "object",
        "properties": {
            "format": {"type": "string", "format": "path"},
            "d": {"const": {"format": "x"}},
        },
    }
    grammar = tool_grammar(HERMES, [Tool("f", schema)], None, False, MODEL)
    assert grammar_fault(grammar, "tools") is None
    assert matches(grammar, written(HERMES.syntax, ("f", '{"format": "a", "d": {"format": "x"}}')))
