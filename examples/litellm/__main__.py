"""LiteLLM: chat, streaming, tools, structured output, cached tokens."""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no look-up outside at import

import litellm
from examples.checks import require, run_checks, server_of_arguments
from examples.task import (
    MAX_TOKENS,
    QUESTION,
    SHAPE_QUESTION,
    TOOL_QUESTION,
    WEATHER_TOOL,
    Person,
    WeatherQuery,
    get_weather,
    long_prompt,
)

SERVER = server_of_arguments(__doc__)
COMMON: dict[str, Any] = {
    "model": f"openai/{SERVER.model}",
    "api_base": f"{SERVER.url}/v1",
    "api_key": SERVER.api_key,
    "max_tokens": MAX_TOKENS,
}


def ask(text: str) -> list[dict[str, Any]]:
    """Return a conversation of one question."""
    return [{"role": "user", "content": text}]


def chat() -> str:
    """Ask and read the whole answer."""
    answer = litellm.completion(messages=ask(QUESTION), **COMMON)
    text = answer.choices[0].message.content
    require(text, f"no text in {answer}")
    return repr(text)


def streaming() -> str:
    """Read the answer as it is written, and the usage after it."""
    stream_options = {"include_usage": True}
    chunks = list(
        litellm.completion(
            messages=ask(QUESTION), stream=True, stream_options=stream_options, **COMMON
        )
    )
    whole = litellm.stream_chunk_builder(chunks)
    text = whole.choices[0].message.content
    require(text and len(chunks) > 2, f"{len(chunks)} chunks with the text {text!r}")
    require(whole.usage.completion_tokens, f"no usage: {whole.usage}")
    return f"{len(chunks)} chunks, {whole.usage.completion_tokens} tokens"


def tools() -> str:
    """Let the model call a tool, send the result back, and read the final answer."""
    messages = ask(TOOL_QUESTION)
    common = {**COMMON, "tools": [WEATHER_TOOL], "parallel_tool_calls": False}
    asked = litellm.completion(messages=messages, tool_choice="required", **common).choices[0]
    require(asked.finish_reason == "tool_calls", f"ended with {asked.finish_reason}")
    (call,) = asked.message.tool_calls
    require(call.function.name == "get_weather", f"called {call}")
    query = WeatherQuery.model_validate_json(call.function.arguments)
    messages.append(asked.message.model_dump())
    messages.append({"role": "tool", "tool_call_id": call.id, "content": get_weather(query.city)})
    final = litellm.completion(messages=messages, tool_choice="none", **common).choices[0].message
    require(final.content, f"no final answer: {final}")
    return f"get_weather({query.city}), then {final.content!r}"


def structured_output() -> str:
    """Hold the answer to the JSON schema of a class."""
    answer = litellm.completion(messages=ask(SHAPE_QUESTION), response_format=Person, **COMMON)
    return repr(Person.model_validate_json(answer.choices[0].message.content))


def cached_tokens() -> str:
    """Ask twice with one long beginning; the second time it is not computed again."""
    prompt = long_prompt()
    seen = []
    for question in ("When does ferry 3 leave?", "And ferry 5?"):
        messages = [{"role": "system", "content": prompt}, *ask(question)]
        details = litellm.completion(messages=messages, **COMMON).usage.prompt_tokens_details
        seen.append((details.cached_tokens or 0) if details else 0)
    require(seen[1] > 0, f"cached tokens of the two requests: {seen}")
    return f"cached tokens {seen[0]}, then {seen[1]}"


if __name__ == "__main__":
    sys.exit(
        run_checks(
            {
                "chat": chat,
                "streaming": streaming,
                "tools": tools,
                "structured output": structured_output,
                "cached tokens": cached_tokens,
            }
        )
    )
