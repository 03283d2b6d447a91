from __future__ import annotations

import json
from array import array

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.gateway_server import RunningGateway, running_gateway
from support.raw_http import Answer, request
from twinfire.gateway.settings import GatewaySettings, RequestLimits

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


def post(gateway: RunningGateway, path: str, body: bytes | dict[str, object]) -> Answer:
    return request(gateway.server.address, "POST", path, body)


def fault(gateway: RunningGateway, path: str, **fields: object) -> dict[str, object]:
    """The 400 of a request that is right but for `fields`, streamed and not."""
    base: dict[str, object] = {"messages": USER} if path == CHAT else {"prompt": "hi"}
    answers = [post(gateway, path, {**base, **extra, **fields}) for extra in ({}, {"stream": True})]
    for answer in answers:
        assert answer.status == 400, answer.body
        assert answer.headers["content-type"] == "application/json"
    error = answers[0].error()
    assert error["type"] == "BadRequestError"
    return error


OUT_OF_RANGE = [
    ("temperature", -0.1, "0.0"),
    ("temperature", 1e300, "100.0"),
    ("top_p", 0, "0.0"),
    ("top_p", 1.1, "1.0"),
    ("min_p", -1, "0.0"),
    ("top_k", -2, "-1"),
    ("presence_penalty", 2.1, "2.0"),
    ("frequency_penalty", -3, "-2.0"),
    ("repetition_penalty", 0, "0.0"),
    ("n", 0, "1"),
    ("n", 129, "128"),
    ("seed", 2**63, str(2**63 - 1)),
    ("min_tokens", -1, "0"),
    ("priority", 2**31, str(2**31 - 1)),
    ("truncate_prompt_tokens", -2, "-1"),
    ("truncate_prompt_tokens", 0, "512"),
    ("truncate_prompt_tokens", 513, "512"),
    ("max_tokens", -1, ""),
    ("max_tokens", 512, "512"),
    ("max_tokens", 2**31, str(2**31 - 1)),
    ("min_tokens", 600, ""),
]


@pytest.mark.parametrize(("field", "value", "limit"), OUT_OF_RANGE)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_number_out_of_range_is_named_with_its_limit(
    gateway: RunningGateway, path: str, field: str, value: float, limit: str
) -> None:
    error = fault(gateway, path, **{field: value})
    assert error["param"] == field
    assert f"`{field}`" in str(error["message"])
    assert limit in str(error["message"])
    if value != 1e300:
        assert str(value) in str(error["message"])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("token", [-1, 264, 2**31, 2**63, 2**64])
def test_ids_outside_the_vocabulary(gateway: RunningGateway, path: str, token: int) -> None:
    num_submitted = len(gateway.backend.submitted)
    for fields in (
        {"logit_bias": {str(token): 1}},
        {"stop_token_ids": [token]},
        {"allowed_token_ids": [token]},
    ):
        (name,) = fields
        assert str(fault(gateway, path, **fields)["param"]).startswith(name)
    if path == COMPLETIONS:
        assert str(fault(gateway, path, prompt=[1, token])["param"]).startswith("prompt")
        assert str(fault(gateway, path, prompt=[[1], [token]])["param"]).startswith("prompt")
    assert len(gateway.backend.submitted) == num_submitted
    assert post(gateway, path, {"messages": USER, "prompt": "hi"}).status == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"stop": "x" * 1025}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words": ["w"] * 257}, "bad_words"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ({"logit_bias": {str(i): 0 for i in range(1025)}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1_0": 1}}, "logit_bias"),
        ({"logit_bias": {"٣": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"1": None}}, "logit_bias"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"request_id": "a\nb"}, "request_id"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"truncation_side": "middle"}, "truncation_side"),
        ({"n": "2"}, "n"),
        ({"n": True}, "n"),
        ({"temperature": "hot"}, "temperature"),
        ({"structural_tag": "{}"}, "structural_tag"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": True}, "best_of"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_wrong_fields(
    gateway: RunningGateway, path: str, fields: dict[str, object], param: str
) -> None:
    assert fault(gateway, path, **fields)["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"tools": {}}, "tools"),
        ({"tools": [1]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "function": 1}]}, "tools[0].function"),
        ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": "a" * 129}}]}, "tools[0].function.name"),
        ({"tools": [{"name": "a"}, {"name": "a"}]}, "tools"),
        ({"tools": [{"name": f"a{i}"} for i in range(129)]}, "tools"),
        ({"tools": [{"name": "a", "description": 1}]}, "tools[0].description"),
        ({"tools": [{"name": "a", "strict": 1}]}, "tools[0].strict"),
        ({"tools": [{"name": "a", "parameters": []}]}, "tools[0].parameters"),
        ({"tools": [{"name": "a", "parameters": {"type": "string"}}]}, "tools[0].parameters.type"),
        (
            {"tools": [{"name": "a", "parameters": {"properties": []}}]},
            "tools[0].parameters.properties",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [{"name": "a"}], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [{"name": "a"}], "tool_choice": {"name": "b"}}, "tool_choice"),
        (
            {
                "tools": [{"name": "a"}],
                "tool_choice": "required",
                "response_format": {"type": "json_object"},
            },
            "response_format",
        ),
        ({"functions": {}}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 512}, "max_completion_tokens"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ],
)
def test_wrong_chat_fields(gateway: RunningGateway, fields: dict[str, object], param: str) -> None:
    assert fault(gateway, CHAT, **fields)["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [[1], 1]}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": "", "add_special_tokens": False}, "prompt"),
        ({"prompt": ["x"] * 1025}, "prompt"),
        ({"prompt": ["x"] * 64, "n": 65}, "n"),
        ({"suffix": "end"}, "suffix"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
    ],
)
def test_wrong_completion_fields(
    gateway: RunningGateway, fields: dict[str, object], param: str
) -> None:
    assert fault(gateway, COMPLETIONS, **fields)["param"] == param


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "none", "parallel_tool_calls": True},
        {"tool_choice": "auto"},
        {"response_format": {"type": "text"}},
        {"suffix": ""},
        {"best_of": 1},
        {"use_beam_search": False},
        {"modalities": ["text"]},
        {"metadata": {"a": "b"}, "store": True, "service_tier": "auto", "unheard_of": [1, {}]},
        {"temperature": 0},
        {"top_k": -1},
        {"n": 128, "max_tokens": 1},
    ],
)
def test_fields_that_ask_for_nothing_are_accepted(
    gateway: RunningGateway, fields: dict[str, object]
) -> None:
    for path in (CHAT, COMPLETIONS):
        answer = post(gateway, path, {"messages": USER, "prompt": "hi", **fields})
        assert answer.status == 200, answer.body


def test_stream_only_and_plain_only_fields(gateway: RunningGateway) -> None:
    for path in (CHAT, COMPLETIONS):
        base: dict[str, object] = {"messages": USER, "prompt": "hi"}
        answer = post(gateway, path, {**base, "stream_options": {"include_usage": True}})
        assert (answer.status, answer.error()["param"]) == (400, "stream_options")
        answer = post(gateway, path, {**base, "stream": True, "prompt_logprobs": 1})
        assert (answer.status, answer.error()["param"]) == (400, "prompt_logprobs")


@pytest.mark.parametrize("stream", [False, True])
def test_too_long_prompt_is_400_before_any_200(gateway: RunningGateway, stream: bool) -> None:
    long = "x" * 600
    for path, body in (
        (CHAT, {"messages": [{"role": "user", "content": long}]}),
        (COMPLETIONS, {"prompt": long}),
        (COMPLETIONS, {"prompt": [97] * 512}),
        (COMPLETIONS, {"prompt": ["fits", long]}),
        (CHAT, {"messages": USER, "max_tokens": 500}),
    ):
        answer = post(gateway, path, {**body, "stream": stream})
        assert answer.status == 400
        assert answer.error()["code"] == "context_length_exceeded"
    assert not gateway.backend.num_running


def test_text_that_cannot_fit_is_refused_before_it_is_tokenised(gateway: RunningGateway) -> None:
    for path, body in (
        (CHAT, {"messages": [{"role": "user", "content": "x" * 10_000_000}]}),
        (COMPLETIONS, {"prompt": "x" * 10_000_000}),
    ):
        answer = post(gateway, path, body)
        assert answer.status == 400
        assert answer.error()["code"] == "context_length_exceeded"
        assert "bytes" in str(answer.error()["message"])


def test_body_over_the_limit_is_413(gateway: RunningGateway) -> None:
    answer = post(gateway, COMPLETIONS, {"prompt": "x" * 17_000_000})
    assert answer.status == 413
    assert "16777216" in str(answer.error()["message"])


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b'{"prompt": NaN}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "seed": ' + b"9" * 6000 + b"}",
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x"} trailing',
        b'{"prompt": "x", "ignored": ' + b"[" * 200_000 + b"}",
        b'{"prompt": "x", "ignored": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"prompt": "x", "response_format": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
    ],
)
def test_broken_bodies_are_400(gateway: RunningGateway, body: bytes) -> None:
    for path in (COMPLETIONS, CHAT):
        answer = post(gateway, path, body)
        assert answer.status == 400, body[:60]
        answer.error()
    for path in ("/tokenize", "/detokenize"):
        assert post(gateway, path, body).status in (200, 400)


def test_wrong_paths_methods_and_content_types(gateway: RunningGateway) -> None:
    address = gateway.server.address
    missing = request(address, "GET", "/v1/nothing")
    assert (missing.status, missing.error()["type"]) == (404, "NotFoundError")
    wrong = request(address, "GET", CHAT)
    assert (wrong.status, wrong.error()["type"]) == (405, "MethodNotAllowedError")
    assert wrong.headers["allow"] == "POST"
    body = json.dumps({"prompt": "x"}).encode()
    form = request(
        address, "POST", COMPLETIONS, body, {"content-type": "application/x-www-form-urlencoded"}
    )
    assert (form.status, form.error()["type"]) == (415, "UnsupportedMediaTypeError")
    for content_type in ("application/json; charset=utf-8", "application/vnd.x+json"):
        headers = {"content-type": content_type}
        assert request(address, "POST", COMPLETIONS, body, headers).status == 200


def test_limits_are_settings() -> None:
    limits = RequestLimits(max_logprobs=2, max_body_bytes=2000)
    with running_gateway(GatewaySettings(limits=limits)) as gateway:
        assert fault(gateway, COMPLETIONS, logprobs=3)["param"] == "logprobs"
        assert post(gateway, COMPLETIONS, {"prompt": "x" * 2000}).status == 413


def test_request_template_where_allowed() -> None:
    with running_gateway(GatewaySettings(allow_request_chat_template=True)) as gateway:
        body = {"messages": USER, "chat_template": "T:{{ messages[0].content }}"}
        assert post(gateway, CHAT, body).status == 200
        assert gateway.backend.submitted[-1][0] == array("I", list(b"T:hi"))
        assert fault(gateway, CHAT, chat_template="{% if")["param"] == "chat_template"
        assert fault(gateway, CHAT, chat_template="{{ none.x.y }}")["param"] == "messages"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    [
        *("model", "messages", "prompt", "n", "stop", "stream", "stream_options", "logprobs"),
        *("top_logprobs", "max_tokens", "temperature", "seed", "logit_bias", "bad_words"),
        *("tools", "echo", "documents", "chat_template_kwargs", "response_format", "tokens"),
        *("allowed_token_ids", "truncate_prompt_tokens", "cache_salt", "request_id", "best_of"),
    ]
)


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.sampled_from([CHAT, COMPLETIONS, "/tokenize", "/detokenize"]),
    st.dictionaries(FIELDS, JSON, max_size=5),
)
def test_fuzzed_bodies_never_crash(
    gateway: RunningGateway, path: str, body: dict[str, object]
) -> None:
    answer = post(gateway, path, json.dumps({"messages": USER, "prompt": "hi", **body}).encode())
    assert answer.status in (200, 400, 404), answer.body
    if answer.status != 200:
        answer.error()
