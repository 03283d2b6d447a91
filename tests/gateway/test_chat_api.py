from __future__ import annotations

import dataclasses
import json

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionChunk

from support.byte_tokenizer import EOS_ID, ByteTokenizer, plain_template
from support.gateway_server import ALIAS, MODEL, RunningGateway, running_gateway, tiny_config
from support.raw_http import request
from support.scripted_backend import say
from twinfire.artifacts.model_config import GenerationDefaults
from twinfire.gateway.served_model import TextSide

USER = [{"role": "user", "content": "hi"}]


def last_prompt(gateway: RunningGateway) -> str:
    return ByteTokenizer().decode(gateway.backend.submitted[-1][0], False)


def chunks_of(client: OpenAI, **fields: object) -> list[ChatCompletionChunk]:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=USER,
        stream=True,
        **fields,  # type: ignore[call-overload]
    )
    return list(stream)


def test_answer(gateway: RunningGateway, client: OpenAI) -> None:
    gateway.backend.script = say("Good day!")
    gateway.backend.cached_tokens = 8
    answer = client.chat.completions.create(model=MODEL, messages=USER)
    choice = answer.choices[0]
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", MODEL)
    assert (choice.message.role, choice.message.content) == ("assistant", "Good day!")
    assert choice.finish_reason == "stop"
    prompt = last_prompt(gateway)
    assert prompt == "<|start|>user\nhi<|end|><|start|>assistant\n"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(gateway.backend.submitted[-1][0])
    assert answer.usage.completion_tokens == len("Good day!") + 1
    assert answer.usage.total_tokens == (
        answer.usage.prompt_tokens + answer.usage.completion_tokens
    )
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 8


def test_stream_has_role_content_finish_and_done(gateway: RunningGateway, client: OpenAI) -> None:
    gateway.backend.script = say("héllo 😀")
    chunks = chunks_of(client)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    contents = [chunk.choices[0].delta.content for chunk in chunks[1:-1]]
    assert "".join(filter(None, contents)) == "héllo 😀"
    assert all(contents), "chunks without text are not worth sending"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_tokens_of_one_step_share_a_chunk(gateway: RunningGateway, client: OpenAI) -> None:
    gateway.backend.script = say("abcdef")
    gateway.backend.tokens_per_step = 4
    contents = [chunk.choices[0].delta.content for chunk in chunks_of(client)]
    assert contents == ["", "abcd", "ef", None]


@pytest.mark.parametrize(
    ("options", "has_final_usage", "has_usage_in_chunks"),
    [
        (None, False, False),
        ({}, False, False),
        ({"include_usage": False}, False, False),
        ({"include_usage": None}, False, False),
        ({"include_usage": True}, True, False),
        ({"include_usage": True, "continuous_usage_stats": True}, True, True),
        ({"include_usage": False, "continuous_usage_stats": True}, False, False),
        ({"continuous_usage_stats": True}, False, False),
    ],
)
def test_stream_options(
    gateway: RunningGateway,
    options: dict[str, bool] | None,
    has_final_usage: bool,
    has_usage_in_chunks: bool,
) -> None:
    gateway.backend.script = say("abc")
    gateway.backend.cached_tokens = 4
    body = {"model": MODEL, "messages": USER, "stream": True, "stream_options": options}
    events = request(gateway.server.address, "POST", "/v1/chat/completions", body).events()
    assert events[-1] == "[DONE]"
    chunks = [event for event in events if isinstance(event, dict)]
    content_chunks = [chunk for chunk in chunks if chunk["choices"]]
    assert all(("usage" in chunk) == has_usage_in_chunks for chunk in content_chunks)
    closing = [chunk for chunk in chunks if not chunk["choices"]]
    assert len(closing) == has_final_usage
    if has_final_usage:
        assert chunks[-1] is closing[0]
        assert closing[0]["usage"]["completion_tokens"] == 4
        assert closing[0]["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    if has_usage_in_chunks:
        counts = [chunk["usage"]["completion_tokens"] for chunk in content_chunks]
        assert counts == sorted(counts)
        assert counts[-1] == 4


def test_choices_of_n_are_apart(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=USER, n=3, seed=7)
    texts = [choice.message.content for choice in answer.choices]
    assert texts == [f"choice {index} of seed 7." for index in range(3)]
    streamed = ["", "", ""]
    for chunk in chunks_of(client, n=3, seed=7):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


@pytest.mark.parametrize("top_logprobs", [None, 0, 1, 5])
@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(
    gateway: RunningGateway, client: OpenAI, top_logprobs: int | None, stream: bool
) -> None:
    gateway.backend.script = say("ab!😀")
    fields = {} if top_logprobs is None else {"top_logprobs": top_logprobs}
    if stream:
        entries = [
            entry
            for chunk in chunks_of(client, logprobs=True, **fields)
            for choice in chunk.choices
            if choice.logprobs is not None
            for entry in choice.logprobs.content or []
        ]
    else:
        answer = client.chat.completions.create(model=MODEL, messages=USER, logprobs=True, **fields)
        assert answer.choices[0].logprobs is not None
        entries = answer.choices[0].logprobs.content or []
    drawn = [*"ab!😀".encode(), EOS_ID]
    assert [entry.bytes for entry in entries[:-1]] == [[token] for token in drawn[:-1]]
    assert entries[2].token == "!"
    assert entries[2].logprob == -9999.0
    assert all(len(entry.top_logprobs) == (top_logprobs or 0) for entry in entries)


def test_no_logprobs_unless_asked(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=USER, logprobs=False)
    assert answer.choices[0].logprobs is None


@pytest.mark.parametrize("tokens_per_step", [1, 3])
def test_stop_string_ends_text_and_cancels_the_choice(
    gateway: RunningGateway, client: OpenAI, tokens_per_step: int
) -> None:
    gateway.backend.script = say("one two three")
    gateway.backend.tokens_per_step = tokens_per_step
    answer = client.chat.completions.create(
        model=MODEL, messages=USER, stop=["tw", "xyz"], logprobs=True
    )
    choice = answer.choices[0]
    assert choice.message.content == "one "
    assert choice.finish_reason == "stop"
    assert choice.model_extra == {"stop_reason": "tw"}
    assert choice.logprobs is not None
    assert [entry.token for entry in choice.logprobs.content or []] == list("one ")
    assert gateway.backend.cancelled
    gateway.run(gateway.backend.idle.wait())


def test_one_choice_stops_and_the_others_go_on(gateway: RunningGateway, client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=USER, n=3, seed=1, stop="choice 1"
    )
    reasons = [(choice.message.content, choice.model_extra) for choice in answer.choices]
    assert reasons == [
        ("choice 0 of seed 1.", {"stop_reason": None}),
        ("", {"stop_reason": "choice 1"}),
        ("choice 2 of seed 1.", {"stop_reason": None}),
    ]


def test_stop_token_is_named_and_end_token_is_not(gateway: RunningGateway, client: OpenAI) -> None:
    gateway.backend.script = say("abc")
    answer = client.chat.completions.create(
        model=MODEL, messages=USER, extra_body={"stop_token_ids": [ord("b")]}
    )
    assert answer.choices[0].message.content == "a"
    assert answer.choices[0].model_extra == {"stop_reason": ord("b")}
    answer = client.chat.completions.create(model=MODEL, messages=USER)
    assert answer.choices[0].model_extra == {"stop_reason": None}


def test_output_is_bounded_by_the_window_and_by_the_newer_field(
    gateway: RunningGateway, client: OpenAI
) -> None:
    client.chat.completions.create(model=MODEL, messages=USER)
    prompt, sampling = gateway.backend.submitted[-1]
    assert sampling.max_tokens == 512 - len(prompt)
    answer = client.chat.completions.create(
        model=MODEL, messages=USER, max_tokens=9, max_completion_tokens=3
    )
    assert gateway.backend.submitted[-1][1].max_tokens == 3
    assert answer.choices[0].finish_reason == "length"


def test_every_sampling_field_arrives(gateway: RunningGateway, client: OpenAI) -> None:
    client.chat.completions.create(
        model=MODEL,
        messages=USER,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"5": 3},
        seed=-1,
        max_tokens=20,
        extra_body={
            "top_k": 7,
            "min_p": 0.25,
            "repetition_penalty": 1.5,
            "min_tokens": 2,
            "ignore_eos": True,
            "allowed_token_ids": [9, 5, 9],
            "bad_words": ["no"],
            "priority": -3,
            "cache_salt": "tenant",
            "prompt_logprobs": 0,
        },
    )
    sampling = gateway.backend.submitted[-1][1]
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.25, 1.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert sampling.logit_bias == ((5, 3.0),)
    assert sampling.seed == 2**64 - 1
    assert (sampling.min_tokens, sampling.ignore_eos) == (2, True)
    assert sampling.allowed_token_ids == (5, 9)
    assert sampling.bad_words == (tuple(b"no"), tuple(b" no"))
    assert (sampling.logprobs, sampling.prompt_logprobs) == (-1, 0)
    assert sampling.eos_token_ids == (EOS_ID,)
    assert gateway.backend.extras[-1] == (-3, "tenant")


def test_absent_and_null_fields_mean_defaults(gateway: RunningGateway) -> None:
    names = ("temperature", "top_p", "n", "stop", "seed", "logit_bias", "max_tokens", "user")
    body = {"model": None, "messages": USER, **dict.fromkeys(names)}
    answer = request(gateway.server.address, "POST", "/v1/chat/completions", body)
    assert answer.status == 200
    first = gateway.backend.submitted[-1][1]
    request(gateway.server.address, "POST", "/v1/chat/completions", {"messages": USER})
    second = gateway.backend.submitted[-1][1]
    assert first.seed != second.seed
    assert (first.temperature, first.top_p, first.top_k, first.n) == (1.0, 1.0, 0, 1)


def test_defaults_of_the_model_apply_unless_given() -> None:
    defaults = GenerationDefaults(temperature=0.5, top_k=9, repetition_penalty=1.25)
    config = dataclasses.replace(tiny_config(), generation=defaults)
    text = TextSide.load(ByteTokenizer(), plain_template(), config)
    with running_gateway(text=text) as own:
        for fields in ({}, {"temperature": 0, "top_k": 0, "repetition_penalty": 1}):
            body = {"messages": USER, **fields}
            assert request(own.server.address, "POST", "/v1/chat/completions", body).status == 200
        drawn = [
            (sampling.temperature, sampling.top_k, sampling.repetition_penalty)
            for _, sampling in own.backend.submitted
        ]
    assert drawn == [(0.5, 9, 1.25), (0.0, 0, 1.0)]


def test_template_that_reads_parts_gets_them() -> None:
    template = plain_template(
        "{% for m in messages %}{% if m.content is string %}S{{ m.content }}"
        "{% else %}{% for part in m.content %}P{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
    )
    text = TextSide.load(ByteTokenizer(), template, tiny_config())
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    with running_gateway(text=text) as own:
        for content in ("a", parts):
            body: dict[str, object] = {"messages": [{"role": "user", "content": content}]}
            assert request(own.server.address, "POST", "/v1/chat/completions", body).status == 200
        assert [bytes(prompt.tolist()) for prompt, _ in own.backend.submitted] == [b"Sa", b"PaPb"]


def test_model_without_a_template_takes_no_conversations() -> None:
    with running_gateway(text=TextSide.load(ByteTokenizer(), None, tiny_config())) as own:
        answer = request(own.server.address, "POST", "/v1/chat/completions", {"messages": USER})
        assert answer.status == 400
        assert "chat template" in str(answer.error()["message"])


def test_content_parts_roles_and_history(gateway: RunningGateway, client: OpenAI) -> None:
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "f", "arguments": json.dumps({"x": 1})},
    }
    client.chat.completions.create(
        model=ALIAS,
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},  # type: ignore[list-item]
            {"role": "tool", "tool_call_id": "1", "content": "42"},
        ],
    )
    assert last_prompt(gateway) == (
        "<|start|>system\nbe brief<|end|><|start|>user\na<|end|>"
        "<|start|>assistant\n<|end|><|start|>tool\n42<|end|><|start|>assistant\n"
    )


def test_continued_and_echoed_final_message(gateway: RunningGateway, client: OpenAI) -> None:
    gateway.backend.script = say(" world")
    messages = [*USER, {"role": "assistant", "content": "hello"}]
    fields = {"continue_final_message": True, "echo": True}
    answer = client.chat.completions.create(
        model=MODEL,
        messages=messages,  # type: ignore[arg-type]
        extra_body=fields,
    )
    assert last_prompt(gateway).endswith("<|start|>assistant\nhello")
    assert answer.choices[0].message.content == "hello world"
    chunks = client.chat.completions.create(
        model=MODEL,
        messages=messages,  # type: ignore[arg-type]
        stream=True,
        extra_body=fields,
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == "hello world"


def test_token_ids_and_prompt_logprobs(gateway: RunningGateway, client: OpenAI) -> None:
    gateway.backend.script = say("ab")
    answer = client.chat.completions.create(
        model=MODEL,
        messages=USER,
        logprobs=True,
        extra_body={
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "prompt_logprobs": 1,
        },
    )
    prompt = list(gateway.backend.submitted[-1][0])
    extra = answer.model_extra or {}
    assert extra["prompt_token_ids"] == prompt
    rows = extra["prompt_logprobs"]
    assert rows[0] is None
    assert len(rows) == len(prompt)
    assert all(str(token) in row for token, row in zip(prompt[1:], rows[1:], strict=True))
    assert rows[1][str(prompt[1])]["decoded_token"] == chr(prompt[1])
    choice = answer.choices[0]
    assert (choice.model_extra or {})["token_ids"] == [*b"ab", EOS_ID]
    assert choice.logprobs is not None
    tokens = [entry.token for entry in choice.logprobs.content or []]
    assert tokens == [f"token_id:{token}" for token in (*b"ab", EOS_ID)]


def test_request_id_is_echoed(gateway: RunningGateway) -> None:
    body = {"messages": USER}
    address = gateway.server.address
    path = "/v1/chat/completions"
    answer = request(address, "POST", path, body, {"X-Request-Id": "abc-1"})
    assert answer.headers["x-request-id"] == "abc-1"
    assert answer.json()["id"] == "chatcmpl-abc-1"
    answer = request(address, "POST", path, {**body, "request_id": "body-1"})
    assert answer.headers["x-request-id"] == "body-1"
    minted = request(address, "POST", path, body)
    assert minted.json()["id"] == "chatcmpl-" + minted.headers["x-request-id"]


def test_unknown_model_is_404(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        client.chat.completions.create(model="nope", messages=USER)
    assert raised.value.code == "model_not_found"
    assert raised.value.param == "model"
