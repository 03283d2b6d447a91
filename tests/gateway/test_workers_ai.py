"""`/ai/run` over a real socket: what goes in, what comes out, and what its clients rely on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import httpx
import pytest
from openai import OpenAI

from support.byte_tokenizer import BOS_ID, ByteTokenizer
from support.gateway_server import MODEL, RunningGateway, running_gateway, tiny_config
from support.raw_http import Answer, request
from support.scripted_backend import ScriptedBackend, say
from twinfire.accounts.prices import ModelPrice, PriceTable
from twinfire.gateway.dialects.stream_padding import MAX_PADDING_CHARS, StreamPadding
from twinfire.gateway.served_model import TextSide
from twinfire.gateway.settings import GatewaySettings
from twinfire.protocol.errors import DeadlineExceeded, Overloaded, WorkerLost

ACCOUNT = "/client/v4/accounts/0123456789abcdef"
KIMI = "@cf/moonshotai/kimi-k2.5"
LLAMA = "@cf/meta/llama-3.1-8b-instruct"
NAMES = {KIMI: MODEL, "@cf/kimi/k2.5": MODEL, LLAMA: MODEL}
USER: list[dict[str, object]] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def running() -> Iterator[RunningGateway]:
    with running_gateway(GatewaySettings(aliases=NAMES)) as gateway:
        yield gateway


@pytest.fixture
def gateway(running: RunningGateway) -> Iterator[RunningGateway]:
    yield running

    async def reset() -> None:
        running.backend.released.set()
        await running.backend.idle.wait()
        fresh = vars(ScriptedBackend())
        for name in set(fresh) - {"_tasks", "num_running", "idle"}:
            setattr(running.backend, name, fresh[name])

    running.run(reset())


def run(
    gateway: RunningGateway,
    body: bytes | dict[str, object],
    model: str = LLAMA,
    headers: dict[str, str] | None = None,
) -> Answer:
    path = f"{ACCOUNT}/ai/run/{model}"
    return request(gateway.server.address, "POST", path, body, headers)


def result_of(answer: Answer) -> dict[str, Any]:
    body: dict[str, Any] = answer.json()
    assert answer.status == 200, body
    assert set(body) == {"result", "success", "errors", "messages"}
    assert (body["success"], body["errors"], body["messages"]) == (True, [], [])
    result: dict[str, Any] = body["result"]
    return result


def fault_of(answer: Answer) -> tuple[int, int, str]:
    """Status, code and message, of an envelope that is checked for its whole shape."""
    body: dict[str, Any] = answer.json()
    assert set(body) == {"result", "success", "errors", "messages"}
    assert (body["success"], body["result"], body["messages"]) == (False, {}, [])
    [error] = body["errors"]
    assert set(error) == {"code", "message"}
    assert answer.headers["cf-ai-req-id"] in error["message"]
    return answer.status, error["code"], error["message"]


def test_the_sample_agent_loop_runs_as_it_stands(gateway: RunningGateway) -> None:
    gateway.backend.script = say("대답")
    base, token = gateway.url, "any-token"
    large_system_prompt = "You are an agent. " * 10
    # The account is left as the sample has it: in a string that nobody fills in.
    url = base + "/client/v4/accounts/{account_id}/ai/run/@cf/kimi/k2.5"
    response = httpx.post(
        url,
        headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
        json={
            "messages": [
                {"role": "system", "content": large_system_prompt},
                {"role": "user", "content": "첫 번째 질문"},
            ]
        },
    )
    assert response.json()["result"]["response"] == "대답"
    session_id = response.headers.get("cf-session-affinity")
    assert session_id
    for follow_up in ("two", "three"):
        response = httpx.post(
            url,
            headers={
                "Authorization": f"Bearer {token}",
                "Content-Type": "application/json",
                "x-session-affinity": session_id,
            },
            json={
                "messages": [
                    {"role": "system", "content": large_system_prompt},
                    {"role": "user", "content": follow_up},
                ]
            },
        )
        assert response.json()["success"] is True
        assert response.headers["cf-session-affinity"] == session_id
    sessions = {context.affinity for context in gateway.backend.contexts}
    assert sessions == {session_id}


@pytest.mark.parametrize("prefix", [ACCOUNT, ""])
def test_all_paths_lead_to_the_model(gateway: RunningGateway, prefix: str) -> None:
    gateway.backend.script = say("yes")
    address = gateway.server.address
    body: dict[str, object] = {"messages": USER}
    for path, sent in (
        (f"/ai/run/{KIMI}", body),
        ("/ai/run/%40cf%2Fmoonshotai%2Fkimi-k2.5", body),
        ("/ai/run", {"model": KIMI, "input": body}),
        ("/ai/run", {"model": KIMI, **body}),
    ):
        result = result_of(request(address, "POST", prefix + path, sent))
        assert (result["response"], result["model"]) == ("yes", KIMI)
    with OpenAI(base_url=f"{gateway.url}{prefix}/ai/v1", api_key="x", max_retries=0) as client:
        assert client.chat.completions.create(model=KIMI, messages=USER).model == KIMI
        assert client.completions.create(model=KIMI, prompt="hi").choices[0].text == "yes"


def test_a_result_is_read_by_clients_of_old_and_new_models(gateway: RunningGateway) -> None:
    gateway.backend.script, gateway.backend.cached_tokens = say("hello"), 2
    for name in (LLAMA, KIMI):
        answer = run(gateway, {"messages": USER}, name)
        result = result_of(answer)
        assert result["response"] == "hello"
        assert result["choices"][0]["message"]["content"] == "hello"
        assert result["choices"][0]["finish_reason"] == "stop"
        assert result["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
        assert result["usage"]["completion_tokens"] == 6
        assert result["id"].endswith(answer.headers["cf-ai-req-id"])


def test_a_conversation_and_its_prompt_are_the_same_tokens(gateway: RunningGateway) -> None:
    run(gateway, {"messages": USER})
    run(gateway, {"prompt": "hi"})
    run(gateway, {"input": "hi"})
    run(gateway, {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]})
    run(gateway, {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]})
    prompts = {prompt.tobytes() for prompt, _ in gateway.backend.submitted}
    assert len(gateway.backend.submitted) == 5
    assert len(prompts) == 1
    run(gateway, {"prompt": "hi", "raw": True})
    assert list(gateway.backend.submitted[-1][0]) == [BOS_ID, *b"hi"]


def test_a_model_without_a_template_takes_a_prompt_as_it_is() -> None:
    bare = TextSide.load(ByteTokenizer(), None, tiny_config())
    with running_gateway(text=bare) as gateway:
        assert run(gateway, {"prompt": "hi"}, MODEL).status == 200
        assert list(gateway.backend.submitted[-1][0]) == [BOS_ID, *b"hi"]
        assert fault_of(run(gateway, {"messages": USER}, MODEL))[:2] == (400, 5006)


def test_null_content_and_mixed_content_are_taken(gateway: RunningGateway) -> None:
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "be brief"}]},
        *USER,
        {"role": "assistant", "content": None, "reasoning": "hm"},
        {"role": "user", "content": "well?"},
    ]
    assert run(gateway, {"messages": messages}).status == 200


def test_the_answer_is_not_cut_without_being_asked(gateway: RunningGateway) -> None:
    gateway.backend.script = say("x" * 400)
    assert len(result_of(run(gateway, {"messages": USER}))["response"]) == 400
    cut = result_of(run(gateway, {"messages": USER, "max_tokens": 3}))
    assert cut["response"] == "xxx"
    assert cut["choices"][0]["finish_reason"] == "length"


def test_sampling_fields_reach_the_worker(gateway: RunningGateway) -> None:
    fields = {"top_k": 5, "repetition_penalty": 1.5, "temperature": 0.25, "seed": 7}
    run(gateway, {"prompt": "hi", **fields})
    _, sampling = gateway.backend.submitted[-1]
    assert (sampling.top_k, sampling.repetition_penalty) == (5, 1.5)
    assert (sampling.temperature, sampling.seed) == (0.25, 7)


@pytest.mark.parametrize("text", ["1", "42.0", "1e3", "null", "true", "", "0x1F", "007"])
def test_an_answer_that_looks_like_a_number_is_a_text(gateway: RunningGateway, text: str) -> None:
    gateway.backend.script = say(text)
    assert result_of(run(gateway, {"messages": USER}))["response"] == text
    for name in (LLAMA, KIMI):
        events = run(gateway, {"messages": USER, "stream": True}, name).events()
        assert text_of_events(events) == text


def text_of_events(events: list[Any]) -> str:
    """What a client adds up that reads both shapes; it fails if any piece is not a string."""
    pieces: list[str] = []
    for event in events[:-1]:
        pieces.append(event.get("response", ""))
        for choice in event.get("choices", []):
            pieces.append(choice["delta"].get("content") or "")
    return "".join(pieces)


def test_native_stream(gateway: RunningGateway) -> None:
    gateway.backend.script, gateway.backend.cached_tokens = say("Hello!"), 3
    answer = run(gateway, {"messages": USER, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, done = answer.events()
    assert done == "[DONE]"
    *texts, finish, usage = events
    assert [event["response"] for event in texts] == list("Hello!")
    for event in (*texts, finish):
        assert 1 <= len(event["p"]) <= MAX_PADDING_CHARS
        assert set(event) <= {"response", "p", "finish_reason"}
    assert (finish["response"], finish["finish_reason"]) == ("", "stop")
    assert set(usage) == {"response", "usage"}
    assert usage["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
    whole = result_of(run(gateway, {"messages": USER}))["usage"]
    assert usage["usage"] == whole


def test_stream_of_newer_models(gateway: RunningGateway) -> None:
    gateway.backend.script, gateway.backend.cached_tokens = say("Hello!"), 3
    *events, done = run(gateway, {"messages": USER, "stream": True}, KIMI).events()
    assert done == "[DONE]"
    *chunks, totals, native = events
    assert all(event["object"] == "chat.completion.chunk" for event in (*chunks, totals))
    assert all(event["model"] == KIMI for event in (*chunks, totals))
    assert all(1 <= len(event["p"]) <= MAX_PADDING_CHARS for event in (*chunks, totals))
    deltas = [event["choices"][0] for event in chunks]
    assert "".join(choice["delta"].get("content", "") for choice in deltas) == "Hello!"
    reasons = [choice["finish_reason"] for choice in deltas if choice["finish_reason"]]
    assert reasons == ["stop"]
    assert totals["choices"] == []
    assert native == {"response": "", "usage": totals["usage"]}
    assert not any("response" in event for event in chunks)


@pytest.mark.parametrize(
    ("style", "has_chunks"), [("native", False), ("openai", True), ("auto", True)]
)
def test_the_operator_chooses_the_streams(style: Any, has_chunks: bool) -> None:
    settings = GatewaySettings(aliases=NAMES, workers_ai_streams=style)
    with running_gateway(settings) as gateway:
        first = run(gateway, {"messages": USER, "stream": True}, KIMI).events()[0]
    assert isinstance(first, dict)
    assert ("choices" in first) is has_chunks


def test_what_one_text_cannot_show_comes_as_chunks(gateway: RunningGateway) -> None:
    events = run(gateway, {"messages": USER, "stream": True, "n": 2}).events()
    indices = {choice["index"] for event in events[:-1] for choice in event.get("choices", [])}
    assert indices == {0, 1}


def test_padding_has_every_length_and_leaves_the_events_alone() -> None:
    padding = StreamPadding()
    frames = b'data: {"a":"}\\n\\n"}\n\ndata: {"b":1}\n\n'
    lengths = set()
    for _ in range(500):
        padded = padding.pad(frames).decode().split("\n\n")
        first, second = (json.loads(frame.removeprefix("data: ")) for frame in padded[:2])
        assert first.pop("p") + second.pop("p")
        assert (first, second) == ({"a": "}\n\n"}, {"b": 1})
        lengths.add(len(padding.tail()))
    assert len(lengths) == MAX_PADDING_CHARS
    assert padding.pad(b"") == b""


def test_json_that_nobody_asked_for_is_a_text(gateway: RunningGateway) -> None:
    text = '{"n": 1.50}'
    gateway.backend.script = say(text)
    assert result_of(run(gateway, {"messages": USER}))["response"] == text


def test_reject_if_busy_and_the_time_limit_reach_the_backend(gateway: RunningGateway) -> None:
    for body, expected in (
        ({}, False),
        ({"options": {"rejectIfBusy": True}}, True),
        ({"options": {"rejectIfBusy": False}}, False),
        ({"options": {}}, False),
        ({"rejectIfBusy": True}, True),
    ):
        assert run(gateway, {"messages": USER, **body}).status == 200
        assert gateway.backend.contexts[-1].reject_if_busy is expected
    enveloped = {"model": KIMI, "input": {"messages": USER}, "options": {"rejectIfBusy": True}}
    assert request(gateway.server.address, "POST", "/ai/run", enveloped).status == 200
    assert gateway.backend.contexts[-1].reject_if_busy is True
    headers = {
        "cf-aig-request-timeout": "60000",
        "cf-aig-gateway-id": "default",
        "cf-aig-skip-cache": "true",
        "cf-aig-cache-ttl": "60",
        "cf-aig-metadata": '{"team":"a"}',
        "cf-aig-collect-log": "false",
    }
    run(gateway, {"messages": USER}, headers=headers)
    assert gateway.backend.contexts[-1].deadline_s is not None
    bad = run(gateway, {"messages": USER}, headers={"cf-aig-request-timeout": "soon"})
    assert fault_of(bad)[:2] == (400, 5006)
    assert "cf-aig-request-timeout" in fault_of(bad)[2]


def test_the_table_of_errors(gateway: RunningGateway) -> None:
    address = gateway.server.address
    cases: list[tuple[int, int, str, Answer]] = [
        (400, 5007, "nobody", run(gateway, {"messages": USER}, "@cf/a/nobody")),
        (400, 5006, "`messages[0].role`", run(gateway, {"messages": [{"role": "x"}]})),
        (400, 5006, "not valid JSON", run(gateway, b"{")),
        (400, 5006, "Exactly one of", run(gateway, {})),
        (400, 5006, "context", run(gateway, {"prompt": "x" * 600})),
        (400, 5006, "`image`", run(gateway, {"prompt": "x", "image": [1]})),
        (400, 5006, "queueRequest", run(gateway, {"requests": []})),
        (400, 3003, "body", run(gateway, b"")),
        (405, 5005, "`lora`", run(gateway, {"prompt": "x", "lora": "mine"})),
        (404, 3042, "name", run(gateway, {"messages": USER}, "m" * 600)),
        (415, 5006, "text/plain", run(gateway, b"x", headers={"content-type": "text/plain"})),
        (404, 7003, "nothing at", request(address, "GET", ACCOUNT + "/ai/nope")),
        (405, 7001, "GET", request(address, "GET", f"{ACCOUNT}/ai/run/{KIMI}")),
        (400, 5006, "`model`", request(address, "POST", "/ai/run", {"messages": USER})),
    ]
    for refusal, status, code, words in (
        (Overloaded("no worker was free", 7), 429, 3040, "Capacity temporarily exceeded, please"),
        (DeadlineExceeded("too late"), 408, 3007, "timeout"),
        (WorkerLost("the worker died"), 503, 7009, "the worker died"),
        (RuntimeError("secret detail"), 500, 7009, "its log says why"),
    ):
        gateway.backend.refusal = refusal  # type: ignore[assignment]
        cases += [(status, code, words, run(gateway, {"messages": USER}))]
        cases += [(status, code, words, run(gateway, {"messages": USER, "stream": True}))]
    for status, code, words, answer in cases:
        if "cf-ai-req-id" not in answer.headers:
            body: Any = answer.json()
            found = answer.status, body["errors"][0]["code"], body["errors"][0]["message"]
        else:
            found = fault_of(answer)
        assert found[:2] == (status, code), found
        assert words in found[2]
        assert "secret detail" not in found[2]
    assert cases[-8][3].headers["retry-after"] == "7"


def test_what_is_refused_before_the_handler_has_the_same_envelope() -> None:
    from twinfire.gateway.settings import RequestLimits

    settings = GatewaySettings(api_keys=("k",), limits=RequestLimits(max_body_bytes=100))
    with running_gateway(settings) as gateway:
        assert fault_of(run(gateway, {"messages": USER}, MODEL))[:2] == (401, 10000)
        key = {"authorization": "Bearer k"}
        assert fault_of(run(gateway, b"x" * 200, MODEL, key))[:2] == (413, 3006)
        assert run(gateway, {"messages": USER}, MODEL, key).status == 200


@pytest.mark.parametrize("name", [LLAMA, KIMI])
def test_a_stream_that_fails_ends_with_an_error_that_is_json(
    gateway: RunningGateway, name: str
) -> None:
    gateway.backend.script, gateway.backend.fails_after = say("Hello!"), 2
    *events, fault, done = run(gateway, {"messages": USER, "stream": True}, name).events()
    assert done == "[DONE]"
    assert text_of_events([*events, done]) == "He"
    assert isinstance(fault, dict)
    assert fault["success"] is False
    assert fault["errors"][0]["code"] == 7009
    assert fault["error"]["message"] == "the worker died"
    assert not any("usage" in event for event in events if isinstance(event, dict))


def test_the_catalogue_tells_prices() -> None:
    price = ModelPrice(input=Decimal("0.95"), cached_input=Decimal("0.19"), output=Decimal(4))
    settings = GatewaySettings(aliases=NAMES, prices=PriceTable(prices={KIMI: price}))
    with running_gateway(settings) as gateway:
        found: Any = request(
            gateway.server.address, "GET", "/ai/models/search?search=kimi-k"
        ).json()
    [model] = found["result"]
    values = {one["property_id"]: one["value"] for one in model["properties"]}
    assert {(one["unit"], one["price"], one["currency"]) for one in values["price"]} == {
        ("per M input tokens", 0.95, "USD"),
        ("per M cached input tokens", 0.19, "USD"),
        ("per M output tokens", 4.0, "USD"),
    }


def test_search_of_the_catalogue(gateway: RunningGateway) -> None:
    def search(query: str) -> dict[str, Any]:
        answer = request(gateway.server.address, "GET", f"{ACCOUNT}/ai/models/search{query}")
        assert answer.status == 200, answer.body
        return answer.json()

    everything = search("")
    names = [model["name"] for model in everything["result"]]
    assert set(names) >= {MODEL, KIMI, LLAMA}
    assert everything["result_info"] == {
        "count": len(names),
        "page": 1,
        "per_page": 50,
        "total_count": len(names),
    }
    model = everything["result"][names.index(KIMI)]
    assert {"property_id": "context_window", "value": "512"} in model["properties"]
    assert model["task"]["name"] == "Text Generation"
    for query, expected in (
        ("?search=KIMI-k2.5", [KIMI]),
        ("?author=meta", [LLAMA]),
        ("?task=Text%20Generation&author=moonshotai", [KIMI]),
        ("?task=Translation", []),
        ("?source=2", []),
        ("?source=1&search=llama", [LLAMA]),
        ("?hide_experimental=true&search=llama", [LLAMA]),
    ):
        assert [one["name"] for one in search(query)["result"]] == expected
    pages = [search(f"?per_page=2&page={page}") for page in (1, 2, 3, 4)]
    assert [one["name"] for page in pages for one in page["result"]] == names
    assert all(page["result_info"]["total_count"] == len(names) for page in pages)
    for query in ("?page=0", "?per_page=101", "?page=x", "?page=%C2%B2", "?page=1e9"):
        bad = request(gateway.server.address, "GET", f"{ACCOUNT}/ai/models/search{query}")
        assert fault_of(bad)[:2] == (400, 5006)
