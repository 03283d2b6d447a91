"""Calls of Qwen3-Coder: tags for the function and each parameter, values as they are.

The JSON type of a value comes from the tool's schema: what is no valid value of another type is a
string. Its models write Hermes' JSON at times, which is read too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from twinfire.gateway.text.answer_sink import AnswerSink
from twinfire.gateway.text.hold_back import GrowingText, Markers, Steps
from twinfire.gateway.text.tool_formats.hermes import CLOSE
from twinfire.gateway.text.tool_formats.json_call import read_json_call

_FUNCTION = "<function="
_OPEN = Markers("<tool_call>", _FUNCTION)
_VALUE_END = Markers("</parameter>")
_TAG_NAME = re.compile(r"[^<>\n]*")
_SPOKEN_VALUES = {"True": "true", "False": "false", "None": "null"}
"""As models that think in Python write them."""


def read_qwen3_coder(text: GrowingText, sink: AnswerSink) -> Steps[None]:
    """Read an answer."""
    while marker := (yield from text.until(_OPEN, sink.content)):
        text.keep()
        if marker == _FUNCTION or (yield from text.expect(_FUNCTION, after_space=True)):
            is_call = yield from _function(text, sink)
        else:
            yield from text.skip_space()
            is_call = yield from read_json_call(text, sink, CLOSE)
        if is_call:
            yield from text.expect("</tool_call>", after_space=True)
        else:
            sink.content(marker + text.kept())


def _function(text: GrowingText, sink: AnswerSink) -> Steps[bool]:
    name = yield from text.word(_TAG_NAME)
    if not sink.is_name(name) or not (yield from text.expect(">")):
        return False
    text.forget()
    sink.start_call(name)
    sink.arguments("{")
    types = _value_types(sink.tools.get(name, {}))
    separator = ""
    while (yield from text.expect("<parameter=", after_space=True)):
        key = yield from text.word(_TAG_NAME)
        yield from text.expect(">")
        sink.arguments(separator + _encoded(key) + ": ")
        separator = ", "
        yield from _value(text, sink, types.get(key, frozenset(("string",))))
    if (yield from text.expect("</function>", after_space=True)):
        sink.arguments("}")
    return True


def _value(text: GrowingText, sink: AnswerSink, types: frozenset[str]) -> Steps[None]:
    yield from text.expect("\n")
    if types == {"string"}:
        value = _StreamedString(sink)
        sink.arguments('"')
        if (yield from text.until(_VALUE_END, value.add)):
            sink.arguments('"')
        return
    pieces: list[str] = []
    if (yield from text.until(_VALUE_END, pieces.append)):
        sink.arguments(_as_json("".join(pieces).removesuffix("\n"), types))
    else:
        # It was cut: what came, so that nothing is lost.
        sink.arguments("".join(pieces))


class _StreamedString:
    """Passes on a value as the inside of a JSON string, without the line break at its end."""

    def __init__(self, sink: AnswerSink) -> None:
        self._sink = sink
        self._held = ""

    def add(self, piece: str) -> None:
        piece = self._held + piece
        self._held = "\n" if piece.endswith("\n") else ""
        self._sink.arguments(_encoded(piece.removesuffix("\n"))[1:-1])


def _as_json(value: str, types: frozenset[str]) -> str:
    spoken = _SPOKEN_VALUES.get(value.strip(), value)
    try:
        decoded: object = msgspec.json.decode(spoken)
    except (msgspec.DecodeError, RecursionError):
        return _encoded(value)
    if isinstance(decoded, str) or ("string" in types and _type_of(decoded) not in types):
        return _encoded(value)
    return spoken.strip()


def _type_of(value: object) -> str:
    names: dict[type, str] = {bool: "boolean", int: "integer", float: "number", list: "array"}
    if value is None:
        return "null"
    return names.get(type(value), "object")


def _value_types(schema: Mapping[str, object]) -> dict[str, frozenset[str]]:
    """Return the JSON types that each parameter may have; none known means any."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return {}
    return {str(key): frozenset(_types(value)) for key, value in properties.items()}


def _types(schema: object) -> list[str]:
    if not isinstance(schema, Mapping):
        return []
    kind = schema.get("type")
    if isinstance(kind, str):
        return [kind]
    if isinstance(kind, list):
        return [str(each) for each in kind]
    alternatives = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(alternatives, list):
        return [each for one in alternatives for each in _types(one)]
    values = schema.get("enum")
    if isinstance(values, list) and all(isinstance(value, str) for value in values):
        return ["string"]
    return []


def _encoded(text: str) -> str:
    return msgspec.json.encode(text).decode()
