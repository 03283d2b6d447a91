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
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.output_parsers import PydanticOutputParser
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
    # The Workers AI class leaves the usage of streams as the server sent it.
    sent = whole.response_metadata.get("usage", {}).get("completion_tokens", 0)
    tokens = whole.usage_metadata["output_tokens"] if whole.usage_metadata else sent
    require(tokens, f"no usage: {whole}")
    return f"{len(chunks)} chunks, {tokens} tokens"


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


def bound_schema(model: BaseChatModel) -> str:
    """Send the schema itself.

    `with_structured_output` of the Workers AI class sends it for few models; for others it asks
    for any JSON object, or offers a tool without forcing its call.
    """
    shape = {"type": "json_schema", "json_schema": task.Person.model_json_schema()}
    parser = PydanticOutputParser(pydantic_object=task.Person)
    return repr((model.bind(response_format=shape) | parser).invoke(task.SHAPE_QUESTION))


def cached_of_message(model: BaseChatModel, messages: list[BaseMessage]) -> int:
    """Ask, and return the cached tokens as LangChain tells them."""
    usage = model.invoke(messages).usage_metadata
    return usage["input_token_details"].get("cache_read", 0) if usage else 0


def cached_of_raw_usage(model: BaseChatModel, messages: list[BaseMessage]) -> int:
    """Ask, and return the cached tokens that the server told: the Workers AI class drops them."""
    usage = (model.generate([messages]).llm_output or {})["token_usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def cached_tokens(model: BaseChatModel, ask: Callable[..., int]) -> str:
    """Ask twice with one long beginning; the second time it is not computed again."""
    prompt = SystemMessage(task.long_prompt())
    questions = ("When does ferry 3 leave?", "And ferry 5?")
    seen = [ask(model, [prompt, HumanMessage(question)]) for question in questions]
    require(seen[1] > 0, f"cached tokens of the two requests: {seen}")
    return f"cached tokens {seen[0]}, then {seen[1]}"


OPENAI, CLOUDFLARE = MODELS.values()
CHECKS: dict[str, Callable[[], str]] = {
    f"{name}: {check.__name__}": partial(check, model)
    for name, model in MODELS.items()
    for check in (chat, streaming, tools)
} | {
    "ChatOpenAI: structured output by schema": partial(structured_output, OPENAI, "json_schema"),
    "ChatOpenAI: structured output by a tool": partial(
        structured_output, OPENAI, "function_calling"
    ),
    "ChatOpenAI: cached tokens": partial(cached_tokens, OPENAI, cached_of_message),
    "ChatCloudflareWorkersAI: structured output": partial(bound_schema, CLOUDFLARE),
    "ChatCloudflareWorkersAI: cached tokens": partial(
        cached_tokens, CLOUDFLARE, cached_of_raw_usage
    ),
}

if __name__ == "__main__":
    sys.exit(run_checks(CHECKS))
