"""OpenAI's Agents SDK, over /v1/responses (its default) and over /v1/chat/completions."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from examples import task
from examples.checks import require, run_checks, server_of_arguments
from openai import AsyncOpenAI

SERVER = server_of_arguments(__doc__)
# The SDK takes a response that reached `max_tokens` for a fault: let it end before.
SENTENCE = ModelSettings(max_tokens=400, include_usage=True, extra_body={"stop": ["."]})
Check = Callable[[str], Coroutine[Any, Any, str]]
APIS: dict[str, type[OpenAIResponsesModel] | type[OpenAIChatCompletionsModel]] = {
    "responses": OpenAIResponsesModel,
    "chat completions": OpenAIChatCompletionsModel,
}


CLIENT = AsyncOpenAI(base_url=f"{SERVER.url}/v1", api_key=SERVER.api_key)


def model_of(api: str) -> Model:
    """Return the server's model as the SDK sees it."""
    return APIS[api](SERVER.model, CLIENT)


@function_tool
def get_weather(city: task.City) -> str:
    """Get the weather of a city."""
    return task.get_weather(city)


async def chat(api: str) -> str:
    """Run an agent to its answer."""
    agent = Agent("assistant", model=model_of(api), model_settings=SENTENCE)
    result = await Runner.run(agent, task.QUESTION)
    require(result.final_output, f"no answer: {result}")
    return repr(result.final_output)


async def streaming(api: str) -> str:
    """Read an agent's answer as it is written."""
    agent = Agent("assistant", model=model_of(api), model_settings=SENTENCE)
    result = Runner.run_streamed(agent, task.QUESTION)
    text, num_pieces = "", 0
    async for event in result.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            text += event.data.delta
            num_pieces += 1
    require(num_pieces > 1, f"{num_pieces} pieces with the text {text!r}")
    require(text == result.final_output, f"{text!r} is not {result.final_output!r}")
    tokens = result.context_wrapper.usage.output_tokens
    require(tokens, "no usage at the end of the stream")
    return f"{num_pieces} pieces, {tokens} tokens"


async def tools(api: str) -> str:
    """Let an agent call its tool; the SDK runs it, sends the result and asks again."""
    settings = SENTENCE.resolve(ModelSettings(tool_choice="required", parallel_tool_calls=False))
    agent = Agent("assistant", model=model_of(api), model_settings=settings, tools=[get_weather])
    result = await Runner.run(agent, task.TOOL_QUESTION, max_turns=4)
    kinds = [item.type for item in result.new_items]
    require("tool_call_item" in kinds and "tool_call_output_item" in kinds, f"only {kinds}")
    require(result.final_output, f"no answer after {kinds}")
    return f"{kinds}, then {result.final_output!r}"


async def structured_output(api: str) -> str:
    """Get an object of a class as the agent's output."""
    agent = Agent(
        "assistant",
        model=model_of(api),
        model_settings=ModelSettings(max_tokens=100),
        output_type=task.Person,
    )
    result = await Runner.run(agent, task.SHAPE_QUESTION)
    require(isinstance(result.final_output, task.Person), f"no person: {result.final_output!r}")
    return repr(result.final_output)


async def cached_tokens(api: str) -> str:
    """Ask twice with the same long instructions; the second time they are not computed again."""
    agent = Agent(
        "assistant",
        instructions=task.long_prompt(),
        model=model_of(api),
        model_settings=SENTENCE,
    )
    seen = []
    for question in ("When does ferry 3 leave?", "And ferry 5?"):
        usage = (await Runner.run(agent, question)).context_wrapper.usage
        seen.append(usage.input_tokens_details.cached_tokens or 0)
    require(seen[1] > 0, f"cached tokens of the two requests: {seen}")
    return f"cached tokens {seen[0]}, then {seen[1]}"


def main() -> int:
    """Run all checks in one event loop: the client keeps its connections there."""
    set_tracing_disabled(True)  # traces would go to OpenAI
    checks = (chat, streaming, tools, structured_output, cached_tokens)
    with asyncio.Runner() as runner:

        def run(check: Check, api: str) -> str:
            return runner.run(check(api))

        return run_checks(
            {
                f"{api}: {check.__name__.replace('_', ' ')}": partial(run, check, api)
                for api in APIS
                for check in checks
            }
        )


if __name__ == "__main__":
    sys.exit(main())
