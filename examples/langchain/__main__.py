"""LangChain, once by `ChatOpenAI` and once by `ChatCloudflareWorkersAI`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial

from examples import task
from examples.checks import require, run_checks, server_of_arguments
from langchain_cloudflare import ChatCloudflareWorkersAI
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

SERVER = server_of_arguments(__doc__)
MODELS: dict[str, BaseChatModel] = {
    "ChatOpenAI": ChatOpenAI(
        model=SERVER.model,
        base_url=f"{SERVER.url}/v1",
        api_key=SERVER.api_key,
        max_completion_tokens=task.MAX_TOKENS,
        stream_usage=True,
    ),
    "ChatCloudflareWorkersAI": ChatCloudflareWorkersAI(
        model=SERVER.model,
        base_url=f"{SERVER.url}/client/v4",
        cloudflare_account_id=os.environ.get("TWINFIRE_ACCOUNT", "any"),
        cloudflare_api_token=SERVER.api_key,
        max_tokens=task.MAX_TOKENS,
    ),
}


@tool
def get_weather(city: task.City) -> str:
    """Get the weather of a city."""
    return task.get_weather(city)


def chat(model: BaseChatModel) -> str:
    """Ask and read the whole answer."""
    answer = model.invoke(task.QUESTION)
    require(answer.text, f"no text in {answer}")
    return repr(answer.text)


def streaming(model: BaseChatModel) -> str:
    """Read the answer as it is written; the sum of the chunks has the usage."""
    chunks = list(model.stream(task.QUESTION))
    whole = sum(chunks[1:], chunks[0])
    require(whole.text and len(chunks) > 2, f"{len(chunks)} chunks with the text {whole.text!r}")
    usage = whole.usage_metadata
    require(usage and usage["output_tokens"], f"no usage: {usage}")
    return f"{len(chunks)} chunks, {usage['output_tokens'] if usage else 0} tokens"


def tools(model: BaseChatModel) -> str:
    """Let the model call a tool, send the result back, and read the final answer."""
    question = HumanMessage(task.TOOL_QUESTION)
    asked = model.bind_tools([get_weather], tool_choice="any").invoke([question])
    require(asked.tool_calls, f"no call in {asked}")
    results = [get_weather.invoke(call) for call in asked.tool_calls]
    require(all(isinstance(result, ToolMessage) for result in results), f"results {results}")
    final = model.bind_tools([get_weather], tool_choice="none").invoke([question, asked, *results])
    require(final.text, f"no final answer: {final}")
    return f"{asked.tool_calls[0]['name']}({asked.tool_calls[0]['args']}), then {final.text!r}"


def structured_output(model: BaseChatModel, method: str) -> str:
    """Get an object of a class."""
    person = model.with_structured_output(task.Person, method=method).invoke(task.SHAPE_QUESTION)
    require(isinstance(person, task.Person), f"no person but {person!r}")
    return repr(person)


def cached_tokens(model: BaseChatModel) -> str:
    """Ask twice with one long beginning; the second time it is not computed again."""
    prompt = SystemMessage(task.long_prompt())
    seen = []
    for question in ("When does ferry 3 leave?", "And ferry 5?"):
        usage = model.invoke([prompt, HumanMessage(question)]).usage_metadata or {}
        seen.append(usage.get("input_token_details", {}).get("cache_read", 0))
    require(seen[1] > 0, f"cached tokens of the two requests: {seen}")
    return f"cached tokens {seen[0]}, then {seen[1]}"


def checks_of(name: str, model: BaseChatModel) -> dict[str, Callable[[], str]]:
    """Return the checks of one of LangChain's models."""
    checks: dict[str, Callable[[], str]] = {
        "chat": partial(chat, model),
        "streaming": partial(streaming, model),
        "tools": partial(tools, model),
        "structured output by schema": partial(structured_output, model, "json_schema"),
        "structured output by a tool": partial(structured_output, model, "function_calling"),
        "cached tokens": partial(cached_tokens, model),
    }
    return {f"{name}: {check}": run for check, run in checks.items()}


if __name__ == "__main__":
    sys.exit(
        run_checks({k: v for name, m in MODELS.items() for k, v in checks_of(name, m).items()})
    )
