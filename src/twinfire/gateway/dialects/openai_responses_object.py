"""The response object as it begins: what the request asked for, with every default filled in."""

from __future__ import annotations

import time

import msgspec

from twinfire.gateway.dialects.chat_job import ChatJob
from twinfire.gateway.dialects.openai_responses_items import (
    FunctionToolShown,
    ReasoningShown,
    ResponseObject,
)
from twinfire.gateway.dialects.openai_responses_requests import ResponsesRequest, ResponsesTool


def begun_response(response_id: str, request: ResponsesRequest, job: ChatJob) -> ResponseObject:
    """Return the response of a request that has passed every check."""
    sampling = job.generation.sampling[0]
    reasoning = request.reasoning
    return ResponseObject(
        id=response_id,
        created_at=int(time.time()),
        status="queued" if request.background else "in_progress",
        background=bool(request.background),
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        model=job.model.name,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        reasoning=ReasoningShown(reasoning.effort, reasoning.summary)
        if reasoning
        else ReasoningShown(),
        safety_identifier=request.safety_identifier,
        store=request.store is not False,
        temperature=sampling.temperature,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        text=_text(request),
        tool_choice=_tool_choice(request),
        tools=[_tool(tool) for tool in request.tools or ()],
        top_logprobs=request.top_logprobs or 0,
        top_p=sampling.top_p,
        truncation=request.truncation or "disabled",
        user=request.user,
        metadata=request.metadata or {},
    )


def _text(request: ResponsesRequest) -> dict[str, object]:
    config = request.text
    shown: dict[str, object] = {"format": {"type": "text"}}
    if config is None:
        return shown
    if config.format is not None and config.format.type == "json_schema":
        format = config.format
        shown["format"] = {
            "type": format.type,
            "name": format.name or "answer",
            "description": format.description,
            "schema": format.schema,
            "strict": bool(format.strict),
        }
    elif config.format is not None:
        shown["format"] = {"type": config.format.type}
    if config.verbosity is not None:
        shown["verbosity"] = config.verbosity
    return shown


def _tool_choice(request: ResponsesRequest) -> object:
    choice = request.tool_choice or "auto"
    return choice if isinstance(choice, str) else _present(msgspec.to_builtins(choice))


def _present(value: object) -> object:
    """Return `value` without the fields that were not given."""
    if isinstance(value, dict):
        return {name: _present(inner) for name, inner in value.items() if inner is not None}
    return [_present(inner) for inner in value] if isinstance(value, list) else value


def _tool(tool: ResponsesTool) -> FunctionToolShown:
    return FunctionToolShown(tool.name or "", tool.description, tool.parameters, tool.strict)
