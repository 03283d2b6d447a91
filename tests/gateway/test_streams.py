"""What goes over the wire of a stream, and when."""

from __future__ import annotations

import asyncio
import json
import threading
from array import array

import pytest
from openai import AsyncOpenAI, OpenAI

from support.byte_tokenizer import ByteTokenizer, plain_template
from support.gateway_server import MODEL, RunningGateway, running_gateway, tiny_config
from support.raw_http import open_post, read_until, request
from support.scripted_backend import count_up, say
from twinfire.gateway.served_model import TextSide
from twinfire.gateway.settings import GatewaySettings
from twinfire.protocol.errors import InvalidRequest, Overloaded, WorkerLost

USER = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
BODIES: list[tuple[str, dict[str, object]]] = [
    (CHAT, {"messages": USER}),
    ("/v1/completions", {"prompt": "hi"}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_headers(gateway: RunningGateway, path: str, body: dict[str, object]) -> None:
    answer = request(gateway.server.address, "POST", path, {**body, "stream": True})
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.body.endswith(b"data: [DONE]\n\n")


def test_every_frame_is_one_line_of_json(gateway: RunningGateway) -> None:
    gateway.backend.script = say('quote " newline \n back \\ \u2028 é')
    answer = request(gateway.server.address, "POST", CHAT, {"messages": USER, "stream": True})
    frames = answer.body.split(b"\n\n")[:-1]
    assert all(frame.startswith(b"data: ") and b"\n" not in frame for frame in frames)
    contents = [event["choices"][0]["delta"].get("content", "") for event in answer.events()[:-1]]  # type: ignore[index]
    assert "".join(contents) == 'quote " newline \n back \\ \u2028 é'


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refusal", "status", "kind"),
    [
        (InvalidRequest("cannot fit", "prompt"), 400, "BadRequestError"),
        (Overloaded("full", retry_after_s=2.5), 429, "RateLimitError"),
        (WorkerLost("gone"), 503, "ServiceUnavailableError"),
    ],
)
def test_refusal_of_the_worker_is_a_status(
    gateway: RunningGateway,
    path: str,
    body: dict[str, object],
    stream: bool,
    refusal: InvalidRequest | Overloaded | WorkerLost,
    status: int,
    kind: str,
) -> None:
    gateway.backend.refusal = refusal
    answer = request(gateway.server.address, "POST", path, {**body, "stream": stream})
    assert (answer.status, answer.error()["type"]) == (status, kind)
    if status == 429:
        assert answer.headers["retry-after"] == "3"


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_fault_in_a_stream_is_an_error_event(
    gateway: RunningGateway, path: str, body: dict[str, object]
) -> None:
    gateway.backend.fails_after = 3
    answer = request(gateway.server.address, "POST", path, {**body, "stream": True})
    assert answer.status == 200
    *_, error, done = answer.events()
    assert done == "[DONE]"
    assert error["error"]["type"] == "ServiceUnavailableError"  # type: ignore[index]
    plain = request(gateway.server.address, "POST", path, body)
    assert (plain.status, plain.error()["type"]) == (503, "ServiceUnavailableError")


@pytest.mark.parametrize(
    ("ending", "status"), [("error", 500), ("cancelled", 503), ("timeout", 504)]
)
def test_choice_that_the_engine_gives_up_is_no_success(
    gateway: RunningGateway, ending: str, status: int
) -> None:
    gateway.backend.ends_with = ending  # type: ignore[assignment]
    answer = request(gateway.server.address, "POST", CHAT, {"messages": USER})
    assert answer.status == status
    answer.error()


def test_silent_stream_starts_late_and_is_kept_alive() -> None:
    settings = GatewaySettings(accept_wait_s=0.05, keep_alive_s=0.05)
    with running_gateway(settings) as gateway:
        gateway.backend.holds_after = -1
        connection = open_post(gateway.server.address, CHAT, {"messages": USER, "stream": True})
        received = read_until(connection, b": queued\n\n")
        received += read_until(connection, b": queued\n\n")
        assert received.startswith(b"HTTP/1.1 200")
        assert b"data:" not in received
        gateway.loop.call_soon_threadsafe(gateway.backend.released.set)
        received += read_until(connection, b"[DONE]")
        assert b'"role":"assistant"' in received
        connection.close()


def test_refusal_after_a_late_start_is_an_error_event() -> None:
    settings = GatewaySettings(accept_wait_s=0.05, keep_alive_s=5)
    with running_gateway(settings) as gateway:
        gateway.backend.holds_after = -1
        gateway.backend.refusal = Overloaded("full")
        connection = open_post(gateway.server.address, CHAT, {"messages": USER, "stream": True})
        read_until(connection, b": queued\n\n")
        gateway.loop.call_soon_threadsafe(gateway.backend.released.set)
        received = read_until(connection, b"[DONE]")
        assert b'"type":"RateLimitError"' in received
        connection.close()


@pytest.mark.parametrize("takes_comments", [True, False])
def test_silence_after_the_first_event_is_no_queue(takes_comments: bool) -> None:
    settings = GatewaySettings(accept_wait_s=2, keep_alive_s=0.02)
    headers = () if takes_comments else (("x-queued-comments", "0"),)
    with running_gateway(settings) as gateway:
        gateway.backend.holds_after = 1
        body: dict[str, object] = {"messages": USER, "stream": True}
        connection = open_post(gateway.server.address, CHAT, body, headers)
        received = read_until(connection, b": keep-alive\n\n")
        assert b"data:" in received
        assert b": queued" not in received
        gateway.loop.call_soon_threadsafe(gateway.backend.released.set)
        read_until(connection, b"[DONE]")
        connection.close()


@pytest.mark.parametrize("refusal", [Overloaded("full"), None])
def test_a_client_that_wants_no_queued_comments_gets_the_true_status(
    refusal: Overloaded | None,
) -> None:
    settings = GatewaySettings(accept_wait_s=0.02, keep_alive_s=0.02)
    with running_gateway(settings) as gateway:
        gateway.backend.holds_after = -1
        gateway.backend.refusal = refusal
        body: dict[str, object] = {"messages": USER, "stream": True}
        connection = open_post(gateway.server.address, CHAT, body, (("x-queued-comments", "0"),))
        gateway.run(gateway.backend.holding.wait())
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(10)
        gateway.loop.call_soon_threadsafe(gateway.backend.released.set)
        received = read_until(connection, b"[DONE]" if refusal is None else b"\r\n\r\n")
        assert received.startswith(b"HTTP/1.1 200" if refusal is None else b"HTTP/1.1 429")
        assert b": queued" not in received
        connection.close()


def test_refusal_before_the_late_start_is_a_status() -> None:
    settings = GatewaySettings(accept_wait_s=30, keep_alive_s=0.01)
    with running_gateway(settings) as gateway:
        gateway.backend.holds_after = -1
        gateway.backend.refusal = Overloaded("full")
        connection = open_post(gateway.server.address, CHAT, {"messages": USER, "stream": True})
        gateway.run(gateway.backend.holding.wait())
        gateway.loop.call_soon_threadsafe(gateway.backend.released.set)
        assert read_until(connection, b"\r\n\r\n").startswith(b"HTTP/1.1 429")
        connection.close()


def test_64_parallel_streams_do_not_mix(gateway: RunningGateway) -> None:
    gateway.backend.script = count_up

    async def one(client: AsyncOpenAI, seed: int) -> str:
        text = ""
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=USER,
            seed=seed,
            stream=True,  # type: ignore[arg-type]
        )
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
        return text

    async def all_of_them() -> list[str]:
        async with AsyncOpenAI(base_url=gateway.url + "/v1", api_key="none") as client:
            return await asyncio.gather(*(one(client, seed) for seed in range(64)))

    texts = asyncio.run(all_of_them())
    assert texts == [f"choice 0 of seed {seed}." for seed in range(64)]


class BlockedTokenizer(ByteTokenizer):
    """Holds whoever tokenises a long text until told to go on."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.go_on = threading.Event()

    def encode(self, text: str, add_special_tokens: bool = True) -> array[int]:
        if len(text) > 10_000:
            self.entered.set()
            assert self.go_on.wait(20)
            return array("I", [97])
        return super().encode(text, add_special_tokens)


def test_long_prompt_being_tokenised_stalls_nobody() -> None:
    tokenizer = BlockedTokenizer()
    text = TextSide.load(tokenizer, plain_template(), tiny_config())
    answers: list[int] = []
    with running_gateway(text=text) as gateway:

        def ask_long() -> None:
            body = {"prompt": "x" * 20_000, "truncate_prompt_tokens": 5}
            answers.append(request(gateway.server.address, "POST", "/v1/completions", body).status)

        thread = threading.Thread(target=ask_long)
        thread.start()
        assert tokenizer.entered.wait(20)
        with OpenAI(base_url=gateway.url + "/v1", api_key="none") as client:
            stream = client.completions.create(model=MODEL, prompt="short", stream=True)
            assert len(list(stream)) > 5
        assert not answers
        tokenizer.go_on.set()
        thread.join(20)
    assert answers == [200]


def test_usage_is_the_same_streamed_and_not(gateway: RunningGateway) -> None:
    gateway.backend.cached_tokens = 3
    body = {"prompt": ["ab", "cde"], "n": 2, "seed": 1}
    plain = request(gateway.server.address, "POST", "/v1/completions", body).json()
    streamed = request(
        gateway.server.address,
        "POST",
        "/v1/completions",
        {**body, "stream": True, "stream_options": {"include_usage": True}},
    ).events()
    assert streamed[-2]["usage"] == plain["usage"]  # type: ignore[index]
    assert plain["usage"]["prompt_tokens_details"] == {"cached_tokens": 6}  # type: ignore[index]
    assert json.dumps(plain["usage"])
