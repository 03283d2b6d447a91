"""Tool calls as a grammar: the output is one call, or several, of tools that were offered.

The text around names and arguments is that of the model family's form; a marker that is one token
of the vocabulary is asked for as that token. Arguments are held to their tool's schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from twinfire.artifacts.token_grammar import JSON_LAYOUT
from twinfire.gateway.hosted_model import ReadyModel
from twinfire.gateway.text.tool_formats.tool_format import CallSyntax, ToolFormat
from twinfire.protocol.grammar import Grammar

MAX_PARALLEL_CALLS = 16
"""Calls in one answer at most, so that it ends."""

PLAIN_SYNTAX = CallSyntax('{"name": "', '", "arguments": ', "}", separator="\n")
"""For a model without a form of its own."""

_ENFORCED_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
_VALUES = ("const", "enum", "default", "examples")
_COMBINES = ("allOf", "anyOf", "oneOf", "$ref", "patternProperties", "unevaluatedProperties")


class OfferedTool(Protocol):
    """A function that the model may call."""

    @property
    def name(self) -> str:
        """What calls say."""
        ...

    @property
    def parameters(self) -> Mapping[str, object] | None:
        """JSON Schema of the arguments; None for any object."""
        ...


def tool_grammar(
    tool_format: ToolFormat | None,
    tools: Sequence[OfferedTool],
    choice: str | None,
    parallel: bool,
    model: ReadyModel,
) -> Grammar:
    """Return the grammar of an answer that calls tools.

    `choice` names the only tool that may be called, exactly once; None leaves the choice. Without
    `parallel` there is exactly one call, with it there are 1 to `MAX_PARALLEL_CALLS`.
    """
    syntax = PLAIN_SYNTAX if tool_format is None else tool_format.syntax
    markers = () if tool_format is None else tool_format.markers
    writer = _Writer(syntax, marker_ids(markers, model), markers)
    chosen = [
        (index, tool) for index, tool in enumerate(tools) if choice is None or tool.name == choice
    ]
    num_calls = MAX_PARALLEL_CALLS if parallel and choice is None else 1
    return Grammar("lark", writer.grammar(chosen, num_calls))


def lark_text(text: str) -> str:
    """Return a text as Lark quotes it: like JSON, but DEL is no character of its texts."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


class _Writer:
    """Writes the rules of one request."""

    def __init__(
        self, syntax: CallSyntax, marker_ids: Mapping[str, int], markers: Sequence[str]
    ) -> None:
        self._syntax = syntax
        self._marker_ids = marker_ids
        longest_first = sorted(markers, key=len, reverse=True)
        self._markers = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
        """Matches the empty text where there are no markers."""

    def grammar(self, tools: Sequence[tuple[int, OfferedTool]], num_calls: int) -> str:
        syntax = self._syntax
        calls = "call_0"
        if num_calls > 1 and syntax.numbered:
            # Each call has another number, so each has a rule.
            calls = " ".join(
                f"({self._text(syntax.separator)} call_{n}" for n in range(1, num_calls)
            )
            calls = "call_0 " + calls + ")?" * (num_calls - 1)
        elif num_calls > 1:
            calls += f" ({self._text(syntax.separator)} call_0){{0,{num_calls - 1}}}"
        rules = [f"start: {self._text(syntax.opens)} {calls} {self._text(syntax.closes)}"]
        for number in range(num_calls if syntax.numbered else 1):
            options = [self._call(index, tool, number) for index, tool in tools]
            rules.append(f"call_{number}: " + " | ".join(options))
        for index, tool in tools:
            rules.append(f"// {tool.name}")
            rules.append(f"arguments_{index}: %json {_arguments_schema(tool.parameters)}")
        return "\n".join(rules) + "\n"

    def _call(self, index: int, tool: OfferedTool, number: int) -> str:
        syntax = self._syntax
        suffix = f":{number}" if syntax.numbered else ""
        name = json.dumps(tool.name, ensure_ascii=False)[1:-1]
        before = self._text(syntax.before_name + name + suffix + syntax.before_arguments)
        return f"{before} arguments_{index} {self._text(syntax.after_arguments)}"

    def _text(self, text: str) -> str:
        """Return a text as a sequence of Lark terms, its markers as tokens."""
        pieces = self._markers.split(text) if self._marker_ids else [text]
        terms = (
            f"<[{self._marker_ids[piece]}]>" if piece in self._marker_ids else lark_text(piece)
            for piece in pieces
            if piece
        )
        return " ".join(terms)


def marker_ids(markers: Sequence[str], model: ReadyModel) -> dict[str, int]:
    """Return the markers that are single tokens, each with its id."""
    ids: dict[str, int] = {}
    for marker in markers:
        encoded = model.text.tokenizer.encode(marker, False)
        if len(encoded) == 1:
            ids[marker] = encoded[0]
    return ids


def _arguments_schema(parameters: Mapping[str, object] | None) -> str:
    """Return a tool's schema in one line, closed where it lists its members."""
    schema = _without_unknown_formats(parameters or {})
    assert isinstance(schema, dict)
    schema.setdefault("type", "object")
    if "properties" in schema and not any(name in schema for name in _COMBINES):
        schema.setdefault("additionalProperties", False)
    schema["x-guidance"] = JSON_LAYOUT
    return msgspec.json.encode(schema).decode()


def _without_unknown_formats(schema: object) -> object:
    """Return a schema without unknown formats, which by the standard only annotate."""
    if isinstance(schema, list):
        return [_without_unknown_formats(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        name: value if name in _VALUES else _without_unknown_formats(value)
        for name, value in schema.items()
        if not (name == "format" and isinstance(value, str) and value not in _ENFORCED_FORMATS)
    }
