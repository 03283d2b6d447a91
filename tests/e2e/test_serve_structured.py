"""Structured outputs of the default model, asked by the real openai client over a real socket."""

from __future__ import annotations

import json
from collections.abc import Iterator

import jsonschema
import openai
import pytest

from support.serve_process import ServeProcess, serve_process

MODEL = "smollm2-135m"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colours": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "colours"],
    "additionalProperties": False,
}
PERSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
ASK = [{"role": "user", "content": "Describe a person as JSON."}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    folder = tmp_path_factory.mktemp("structured")
    with serve_process(folder, "--kv-cache-memory", "512MiB") as running:
        yield running
    assert running.process.returncode == 0, running.output()


@pytest.fixture
def client(server: ServeProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_json_schema_whole_and_streamed(client: openai.OpenAI) -> None:
    common = {
        "model": MODEL,
        "messages": ASK,
        "response_format": PERSON_FORMAT,
        "seed": 3,
        "n": 3,
        "max_tokens": 120,
    }
    whole = client.chat.completions.create(**common)
    texts = ["", "", ""]
    reasons: list[str | None] = [None] * 3
    for chunk in client.chat.completions.create(stream=True, **common):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    for choice, text, reason in zip(whole.choices, texts, reasons, strict=True):
        assert choice.finish_reason == reason == "stop"
        assert choice.message.content == text
        jsonschema.validate(json.loads(text), PERSON)


def test_any_object_and_log_probabilities(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=ASK,
        response_format={"type": "json_object"},
        max_tokens=200,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    choice = answer.choices[0]
    text = choice.message.content or ""
    assert choice.logprobs is not None
    assert "".join(token.token for token in choice.logprobs.content or []) == text
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(text), dict)
    else:
        assert choice.finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 200


def test_a_short_budget_ends_honestly(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=ASK, response_format=PERSON_FORMAT, max_tokens=4
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


def test_regular_expressions_choices_and_grammars(client: openai.OpenAI) -> None:
    def ask(**shape: object) -> str:
        answer = client.completions.create(
            model=MODEL, prompt="The sky is", max_tokens=12, temperature=0, extra_body=shape
        )
        assert answer.choices[0].finish_reason == "stop"
        return answer.choices[0].text

    assert ask(guided_choice=["red", "blue"]) in ("red", "blue")
    assert ask(structured_outputs={"regex": "[0-9]{4}-[0-9]{2}"})[4] == "-"
    assert ask(guided_grammar='root ::= "yes " ("!" | "?")') in ("yes !", "yes ?")
    assert ask(guided_json={"const": {"a": 1}}).replace(" ", "") == '{"a":1}'


@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_done_is_refused_before_the_answer(
    client: openai.OpenAI, stream: bool
) -> None:
    def fault(**fields: object) -> openai.BadRequestError:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(
                model=MODEL, messages=ASK, stream=stream, extra_body=fields, max_tokens=20
            )
        return caught.value

    unsupported = fault(guided_json={"properties": {"a": {"uniqueItems": True}}})
    assert "`uniqueItems`" in str(unsupported)
    assert "$.properties.a" in str(unsupported)
    assert unsupported.code == "unsupported_schema"
    # Only the worker knows special tokens and what the ids of a bias mean for a grammar.
    assert "<|nothing|>" in str(fault(guided_grammar="start: <|nothing|>"))
    nothing_left = fault(guided_regex="[a-z]+", allowed_token_ids=[0])
    assert nothing_left.param == "allowed_token_ids"
    answer = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=2)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2
