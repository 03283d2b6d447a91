"""The native input of `/ai/run` as a body of a chat request.

Works on the fields' raw text: what is not changed reaches the chat request byte by byte, with its
digits, its order and its size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import msgspec
from msgspec import Raw

from twinfire.gateway.dialects.requests import ChatRequest
from twinfire.protocol.errors import InvalidRequest

Fields = dict[str, Raw]
T = TypeVar("T")

_NULL = Raw(b"null")
_TRUE = Raw(b"true")
_NOT_TEXT = ("image", "image_b64", "audio", "text_b64")
_FIELDS = msgspec.json.Decoder(Fields)
_ENVELOPE_OPTIONS = ("options", "rejectIfBusy")


@dataclass(frozen=True, slots=True)
class RunInput:
    """What a native request asks for."""

    chat_body: bytes
    """As `/v1/chat/completions` reads it."""
    is_raw: bool
    """Whether the only message is the whole prompt, which no template frames."""
    is_prompt: bool
    """Whether a text was given instead of messages."""


def read_fields(body: bytes) -> Fields:
    """Return a JSON object's fields; InvalidRequest when the body is none."""
    if not body.strip():
        raise InvalidRequest("the body is empty; a JSON object is needed", code="body_missing")
    try:
        return _FIELDS.decode(body)
    except msgspec.ValidationError:
        raise InvalidRequest("The request body must be a JSON object.") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The request body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("The request body is nested too deeply.") from None


def unwrap(fields: Fields) -> tuple[str, Fields]:
    """Return model and input of a body of `/ai/run`: `{model, input}`, or all fields side by side.

    Options may stand beside the input or in it.
    """
    model = field_of(fields, "model", str)
    if not model:
        raise InvalidRequest("`model` is needed where the path names none.", "model")
    given = fields.get("input", _NULL)
    if not bytes(given).lstrip().startswith(b"{"):
        return model, fields
    beside = {name: fields[name] for name in _ENVELOPE_OPTIONS if name in fields}
    return model, {**beside, **read_fields(bytes(given))}


def field_of(fields: Fields, name: str, kind: type[T]) -> T | None:
    """Return a field, None when it is absent or null; InvalidRequest when it is of another kind."""
    try:
        return msgspec.json.decode(bytes(fields.get(name, _NULL)), type=kind | None)
    except msgspec.ValidationError as error:
        reason = str(error)[:1].lower() + str(error)[1:]
        raise InvalidRequest(f"`{name}`: {reason}.", name) from None
    except RecursionError:
        raise InvalidRequest(f"`{name}` is nested too deeply.", name) from None


def run_input(fields: Fields, model: str) -> RunInput:
    """Return the fields of a native request for `model` as a chat request's."""
    _refuse(fields)
    chat = {name: raw for name, raw in fields.items() if name not in ("prompt", "raw", "input")}
    is_raw = field_of(fields, "raw", bool) is True
    chat["model"] = _raw(model)
    chat["messages"] = _messages(fields, is_raw)
    tools = field_of(fields, "tools", list[Fields])
    if tools is not None:
        chat["tools"] = _raw([_nested_tool(tool) for tool in tools])
    options = field_of(fields, "options", Fields)
    if options is not None and field_of(options, "rejectIfBusy", bool):
        chat["rejectIfBusy"] = _TRUE
    # Streams of this dialect always end with what they used.
    stream_options = field_of(fields, "stream_options", Fields) or {}
    if field_of(fields, "stream", bool):
        chat["stream_options"] = _raw({**stream_options, "include_usage": _TRUE})
    is_prompt = fields.get("messages", _NULL) == _NULL
    return RunInput(msgspec.json.encode(chat), is_raw, is_prompt)


def asks_for_json(request: ChatRequest) -> bool:
    """Whether the answer is to be JSON."""
    asked = request.response_format
    return isinstance(asked, dict) and asked.get("type") in ("json_object", "json_schema")


def _refuse(fields: Fields) -> None:
    for name in _NOT_TEXT:
        if fields.get(name, _NULL) != _NULL:
            raise InvalidRequest(f"`{name}` is not supported: this server takes text only.", name)
    if fields.get("lora", _NULL) != _NULL:
        raise InvalidRequest("`lora` names an adapter.", "lora", "lora_unsupported")
    if "requests" in fields:
        raise InvalidRequest("`requests` needs `?queueRequest=true` in the URL.", "requests")


def _messages(fields: Fields, is_raw: bool) -> Raw:
    given = [name for name in ("messages", "prompt", "input") if fields.get(name, _NULL) != _NULL]
    if len(given) != 1:
        raise InvalidRequest("Exactly one of `messages` and `prompt` is needed.", "messages")
    name = given[0]
    if is_raw and name != "prompt":
        raise InvalidRequest("`raw` goes with `prompt`.", "raw")
    if name == "messages":
        return fields["messages"]
    if name == "input" and bytes(fields["input"]).lstrip().startswith(b"["):
        return fields["input"]
    text = field_of(fields, name, str)
    if not text:
        raise InvalidRequest(f"`{name}` must not be empty.", name)
    return _raw([{"role": "user", "content": text}])


def _nested_tool(tool: Fields) -> Fields:
    """Return a tool in OpenAI's shape; older models' tools have no `type` and no `function`."""
    if "function" in tool or "type" in tool:
        return tool
    return {"type": _raw("function"), "function": _raw(tool)}


def _raw(value: object) -> Raw:
    return Raw(msgspec.json.encode(value))
