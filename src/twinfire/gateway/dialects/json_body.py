"""From a request's bytes to its struct; a fault names the field, the value and the limit."""

from __future__ import annotations

import re
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from twinfire.protocol.errors import InvalidRequest

JsonValue = Annotated[object, Meta(extra_json_schema={"description": "Any JSON value."})]
"""A field whose shape is not ours to check."""

S = TypeVar("S", bound=msgspec.Struct)

_AT_PATH = re.compile(r"^(?P<message>.*) - at `\$(?P<path>.*)`$", re.DOTALL)
_PATH_STEP = re.compile(r"\.([^.\[]+)|\[(\d+)\]")
_MAX_SHOWN_VALUE_CHARS = 80


def decode_body(body: bytes, decoder: msgspec.json.Decoder[S]) -> S:
    """Return the struct; InvalidRequest when the body is not one."""
    if not body:
        raise InvalidRequest("The request body is empty; a JSON object is needed.")
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _describe(body, str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The request body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("The request body is nested too deeply.") from None


def _describe(body: bytes, fault: str) -> InvalidRequest:
    match = _AT_PATH.match(fault)
    if match is None:
        return InvalidRequest(f"The request body is wrong: {_lower_first(fault)}.")
    path = match["path"].lstrip(".")
    message = _lower_first(match["message"])
    param = path.replace("[...]", "") or None
    missing = re.search(r"missing required field `(.+)`", match["message"])
    if missing is not None:
        param = f"{path}.{missing[1]}" if path else missing[1]
        return InvalidRequest(f"`{param}` is required.", param=param)
    got = "" if ", got " in message else _value_at(body, match["path"])
    return InvalidRequest(f"`{param}`: {message}{got}.", param=param)


def _value_at(body: bytes, path: str) -> str:
    """Return ", got VALUE" for messages that tell only what was expected."""
    if "[...]" in path:
        return ""
    try:
        value: object = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return ""
    for name, index in _PATH_STEP.findall(path):
        if name and isinstance(value, dict):
            value = value.get(name)
        elif index and isinstance(value, list) and int(index) < len(value):
            value = value[int(index)]
        else:
            return ""
    shown = msgspec.json.encode(value).decode()
    if len(shown) > _MAX_SHOWN_VALUE_CHARS:
        shown = shown[:_MAX_SHOWN_VALUE_CHARS] + "…"
    return f", got {shown}"


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
