"""The openai Python client: chat, streaming, tools, structured output, cached tokens."""

from __future__ import annotations

import sys
from typing import Any

import openai
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
CLIENT = openai.OpenAI(base_url=f"{SERVER.url}/v1", api_key=SERVER.api_key)


def chat() -> str:
    """Ask and read the whole answer."""
    answer = CLIENT.chat.completions.create(
        model=SERVER.model,
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=MAX_TOKENS,
    )
    text = answer.choices[0].message.content
    require(text, f"no text in {answer}")
    return repr(text)


def streaming() -> str:
    """Read the answer as it is written, and the usage after it."""
    text, num_chunks, usage = "", 0, None
    for chunk in CLIENT.chat.completions.create(
        model=SERVER.model,
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=MAX_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
    ):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            num_chunks += 1
        usage = chunk.usage or usage
    require(text and num_chunks > 2, f"{num_chunks} chunks with the text {text!r}")
    require(usage and usage.completion_tokens, f"no usage: {usage}")
    return f"{num_chunks} chunks, {usage.completion_tokens if usage else 0} tokens"


def tools() -> str:
    """Let the model call a tool, send the result back, and read the final answer."""
    messages: list[Any] = [{"role": "user", "content": TOOL_QUESTION}]
    common: dict[str, Any] = {
        "model": SERVER.model,
        "messages": messages,
        "tools": [WEATHER_TOOL],
        "parallel_tool_calls": False,
        "max_tokens": MAX_TOKENS,
    }
    asked = CLIENT.chat.completions.create(tool_choice="required", **common).choices[0]
    require(asked.finish_reason == "tool_calls", f"ended with {asked.finish_reason}")
    (call,) = asked.message.tool_calls or []
    require(call.type == "function" and call.function.name == "get_weather", f"called {call}")
    query = WeatherQuery.model_validate_json(call.function.arguments)
    messages.append(asked.message)
    messages.append({"role": "tool", "tool_call_id": call.id, "content": get_weather(query.city)})
    final = CLIENT.chat.completions.create(tool_choice="none", **common).choices[0].message
    require(final.content, f"no final answer: {final}")
    return f"get_weather({query.city}), then {final.content!r}"


def structured_output() -> str:
    """Hold the answer to the JSON schema of a class, and get an object of it."""
    answer = CLIENT.chat.completions.parse(
        model=SERVER.model,
        messages=[{"role": "user", "content": SHAPE_QUESTION}],
        response_format=Person,
        max_tokens=MAX_TOKENS,
    )
    person = answer.choices[0].message.parsed
    require(isinstance(person, Person), f"no person in {answer}")
    return repr(person)


def cached_tokens() -> str:
    """Ask twice with one long beginning; the second time it is not computed again."""
    prompt = long_prompt()
    seen = []
    for question in ("When does ferry 3 leave?", "And ferry 5?"):
        usage = CLIENT.chat.completions.create(
            model=SERVER.model,
            messages=[
                {"role": "system", "content": prompt},
                {"role": "user", "content": question},
            ],
            max_tokens=4,
        ).usage
        details = usage.prompt_tokens_details if usage else None
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
