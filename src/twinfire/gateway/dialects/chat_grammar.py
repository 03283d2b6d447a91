"""What a chat answer must look like: calls that are asked for, a response format, or either.

A grammar holds the answer alone. What the model thinks before it is free, as in vLLM.
"""

from __future__ import annotations

import json
import re

import msgspec

from twinfire.artifacts.token_grammar import JSON_LAYOUT
from twinfire.gateway.dialects.output_grammar import (
    check_grammar,
    requested_grammar,
    tool_grammar,
)
from twinfire.gateway.dialects.requests import ChatRequest
from twinfire.gateway.dialects.tools import RequestedTools
from twinfire.gateway.gateway import Gateway
from twinfire.gateway.hosted_model import ReadyModel
from twinfire.gateway.text.answer_splitter import AnswerPlan
from twinfire.gateway.text.vocabulary import Vocabulary
from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.grammar import Grammar

_PLAIN_SLASH = re.compile(r"(\\.)|/", re.DOTALL)


async def chat_grammar(
    gateway: Gateway,
    request: ChatRequest,
    tools: RequestedTools | None,
    model: ReadyModel,
    plan: AnswerPlan | None,
) -> Grammar | None:
    """Return the checked grammar of an answer, None where it may be anything.

    InvalidRequest names the field that is wrong or cannot be held to.
    """
    form = await requested_grammar(gateway, request, model)
    calls = _calls(tools, model)
    if calls is None:
        grammar, param = form, "response_format"
    elif tools is not None and tools.mode == "required":
        if form is not None:
            raise InvalidRequest(
                "A forced `tool_choice` and a response format exclude each other.",
                "response_format",
            )
        grammar, param = calls, "tools"
    elif form is not None:
        # The model may call a tool first and give the answer in its form later.
        grammar = Grammar(
            "lark", f"start: calls | answer\n{_rule('calls', calls)}{_rule('answer', form)}"
        )
        param = "response_format"
    else:
        return None
    if grammar is None:
        return None
    if plan is not None and plan.reasoning is not None:
        grammar = _after_reasoning(grammar, plan, model.text.vocabulary)
    await check_grammar(gateway, grammar, model, param=param)
    return grammar


def _calls(tools: RequestedTools | None, model: ReadyModel) -> Grammar | None:
    if tools is None or not tools.may_be_called or not tools.callable:
        return None
    tool_format = model.text.formats.tools
    if tool_format is None:
        if tools.mode == "required":
            raise InvalidRequest(
                "This server reads no tool calls of the model, so `tool_choice` cannot force any.",
                "tool_choice",
            )
        return None
    named = tools.callable[0].name if tools.is_named else None
    return tool_grammar(tool_format, tools.callable, named, tools.parallel, model)


def _after_reasoning(grammar: Grammar, plan: AnswerPlan, vocabulary: Vocabulary) -> Grammar:
    """Return the grammar with what the model thinks before it, in the plan's form."""
    form = plan.reasoning
    assert form is not None, "the plan has reasoning"
    end_id = next(iter(vocabulary.special_ids_of((form.end,))), None)
    if end_id is None:
        thinking = f"thinking[suffix={json.dumps(form.end)}]: /(?s:.*)/\n"
    else:
        thinking = f"thinking: THOUGHT <[{end_id}]>\nTHOUGHT: /(?s:.*)/\n"
    start_id = next(iter(vocabulary.special_ids_of((form.start,))), None)
    opening = json.dumps(form.start) if start_id is None else f"<[{start_id}]>"
    first = "thinking" if plan.reasoning_is_open else f"({opening} thinking)?"
    return Grammar("lark", f"start: {first} answer\n{thinking}{_rule('answer', grammar)}")


def _rule(name: str, grammar: Grammar) -> str:
    """Return a grammar as a rule of another."""
    if grammar.kind == "lark":
        return f"{name}: %lark {{\n{grammar.text}\n}}\n"
    if grammar.kind == "regex":
        pattern = _PLAIN_SLASH.sub(lambda match: match[1] or "\\/", grammar.text)
        one_line = pattern.replace("\n", "\\n")
        return f"{name}: /{one_line}/\n"
    schema: object = msgspec.json.decode(grammar.text)
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": JSON_LAYOUT}
    return f"{name}: %json {msgspec.json.encode(schema).decode()}\n"
