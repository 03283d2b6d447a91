"""From the fields that say what an output must look like to the grammar that holds it to that.

Owns the fields of OpenAI (`response_format`), of Workers AI (the same with a bare schema) and of
vLLM (`structured_outputs`, `guided_*`). What a grammar may be and cost is checked by
`check_grammar`, on a thread, before a request is accepted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import msgspec

from twinfire.gateway.dialects.ebnf import lark_of
from twinfire.gateway.dialects.grammar_faults import check_size, grammar_fault
from twinfire.gateway.dialects.requests import SamplingFields
from twinfire.gateway.dialects.tool_grammar import lark_text, tool_grammar
from twinfire.gateway.gateway import Gateway
from twinfire.gateway.hosted_model import ReadyModel
from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.grammar import Grammar

__all__ = ["check_grammar", "requested_grammar", "response_grammar", "tool_grammar"]

ANY_OBJECT = '{"type":"object"}'
_SHAPE_FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
_KINDS = ("json", "regex", "choice", "grammar", "json_object")
"""Of `structured_outputs`, as vLLM names them."""


async def requested_grammar(
    gateway: Gateway, request: SamplingFields, model: ReadyModel
) -> Grammar | None:
    """Return `response_grammar` once it is checked."""
    grammar = response_grammar(request, model)
    if grammar is not None:
        param = _shape_field(request) or "response_format"
        await check_grammar(gateway, grammar, model, param=param)
    return grammar


def response_grammar(request: SamplingFields, model: ReadyModel) -> Grammar | None:
    """Return what the request's output must look like, None where it may be anything.

    InvalidRequest names the field that is wrong, or two that both say it.
    """
    del model  # One model's grammars are written like another's.
    param = _shape_field(request)
    if param is None:
        return None
    value: object = getattr(request, param)
    if param == "response_format":
        return _of_response_format(value)
    if param == "structured_outputs":
        return _of_structured_outputs(value)
    return _OF_KIND[param.removeprefix("guided_")](param, value)


def _shape_field(request: SamplingFields) -> str | None:
    """Return the field that says what the output must look like, None where none does."""
    named = [name for name in _SHAPE_FIELDS if _asks_for_something(getattr(request, name))]
    if len(named) > 1:
        raise InvalidRequest(
            f"`{named[0]}` and `{named[1]}` both say what the output looks like; send one.",
            named[1],
        )
    return named[0] if named else None


async def check_grammar(
    gateway: Gateway, grammar: Grammar, model: ReadyModel, *, param: str = "response_format"
) -> None:
    """Raise InvalidRequest, naming the feature and its place, unless workers can compile this.

    Each grammar is looked at once, on a thread. Of special tokens only the worker knows.
    """
    del model
    check_size(grammar, gateway.settings.limits, param)
    known = gateway.checked_grammars
    if grammar in known:
        return
    fault = await asyncio.to_thread(grammar_fault, grammar, param)
    if fault is not None:
        raise fault
    known.add(grammar)


def _asks_for_something(value: object) -> bool:
    return value is not None and not (isinstance(value, Mapping) and value.get("type") == "text")


def _of_response_format(value: object) -> Grammar:
    if not isinstance(value, Mapping):
        raise InvalidRequest("`response_format` must be an object.", "response_format")
    match value.get("type"):
        case "json_object":
            return Grammar("json_schema", ANY_OBJECT)
        case "json_schema":
            return _json("response_format.json_schema", _schema_of(value))
        case other:
            raise InvalidRequest(
                f"`response_format.type` is {other!r}; it must be `text`, `json_object` or "
                "`json_schema`.",
                "response_format.type",
            )


def _schema_of(value: Mapping[object, object]) -> object:
    """Return the schema of OpenAI's envelope, of that of its responses API, or a bare one."""
    inner = value.get("json_schema", value)
    if isinstance(inner, Mapping) and (inner is value or isinstance(inner.get("schema"), Mapping)):
        inner = inner.get("schema")
    if inner is None:
        raise InvalidRequest(
            "`response_format.json_schema` is required with type `json_schema`.",
            "response_format.json_schema",
        )
    return inner


def _of_structured_outputs(value: object) -> Grammar:
    param = "structured_outputs"
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"`{param}` must be an object.", param)
    given = [kind for kind in _KINDS if value.get(kind) not in (None, False)]
    if len(given) != 1:
        listed = ", ".join(f"`{kind}`" for kind in _KINDS)
        raise InvalidRequest(f"`{param}` must have exactly one of {listed}.", param)
    return _OF_KIND[given[0]](f"{param}.{given[0]}", value[given[0]])


def _json(param: str, value: object) -> Grammar:
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequest(f"`{param}` is not JSON: {error}.", param) from None
    if not isinstance(value, Mapping | bool):
        raise InvalidRequest(f"`{param}` must be a JSON Schema.", param)
    return Grammar("json_schema", msgspec.json.encode(value).decode())


def _json_object(param: str, value: object) -> Grammar:
    if value is not True:
        raise InvalidRequest(f"`{param}` must be true or absent.", param)
    return Grammar("json_schema", ANY_OBJECT)


def _regex(param: str, value: object) -> Grammar:
    return Grammar("regex", _text(param, value))


def _choice(param: str, value: object) -> Grammar:
    texts = value if isinstance(value, list) else []
    if not texts or not all(isinstance(one, str) and one for one in texts):
        raise InvalidRequest(f"`{param}` must be a list of texts, none of them empty.", param)
    return Grammar("lark", "start: " + " | ".join(lark_text(one) for one in texts))


def _grammar(param: str, value: object) -> Grammar:
    return Grammar("lark", lark_of(_text(param, value), param))


def _text(param: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"`{param}` must be a text that is not empty.", param)
    return value


_OF_KIND: Mapping[str, Callable[[str, object], Grammar]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
