"""Text that is written as it comes: the same bytes, the same order, and slow clients still wait."""

from __future__ import annotations

import asyncio
import json
import socket
from array import array
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.gateway_server import MODEL, RunningGateway, byte_text_side, running_gateway
from support.scripted_backend import ScriptedBackend, say, worker_info
from twinfire.gateway.backends.generation import LinkGeneration
from twinfire.gateway.dialects.chat_job import ChatJob
from twinfire.gateway.dialects.chat_stream import ChatStream
from twinfire.gateway.dialects.completion_stream import CompletionStream
from twinfire.gateway.dialects.logprobs import LogprobFormat
from twinfire.gateway.dialects.requests import ChatRequest
from twinfire.gateway.dialects.sse import ChunkFrame
from twinfire.gateway.gateway import Gateway
from twinfire.gateway.hosted_model import HostedModel, HostedModels
from twinfire.gateway.metrics import Metrics
from twinfire.gateway.request_meter import RequestMeter
from twinfire.gateway.served_model import ServedModel
from twinfire.gateway.settings import GatewaySettings
from twinfire.gateway.text.answer_parts import AnswerDelta, ContentText
from twinfire.gateway.text.choice_text import TextDelta, TextOptions
from twinfire.gateway.text.stop_strings import StopStrings
from twinfire.gateway.text_generation import GenerationJob, TextGeneration
from twinfire.protocol.messages import ChoiceDelta, PromptDone
from twinfire.protocol.sampling import SamplingParams
from twinfire.protocol.tokens import pack_ids

VOCABULARY = byte_text_side().vocabulary
ANSWER_ID = 'id "quoted" é'


def new_meter(n: int) -> RequestMeter:
    return RequestMeter(Metrics(MODEL), 0.0, [2], n)


def chat_job() -> ChatJob:
    hosted = HostedModel.of(ServedModel((MODEL,), byte_text_side()), ScriptedBackend())
    gateway = Gateway(GatewaySettings(), HostedModels([hosted]))
    return ChatJob(
        gateway=gateway,
        request=ChatRequest(messages=[]),
        model=gateway.ready_model(MODEL),
        generation=GenerationJob(
            [array("I", [1, 2])],
            [SamplingParams(max_tokens=100, seed=1, n=4)],
            TextOptions(StopStrings([])),
        ),
        answer_id=ANSWER_ID,
        created_s=7,
        echoed="",
        num_top_logprobs=None,
    )


def completion_stream() -> CompletionStream:
    frame = ChunkFrame(
        answer_id=ANSWER_ID, kind="text_completion", created_s=7, model=MODEL, fingerprint="f"
    )
    return CompletionStream(
        frame, LogprobFormat(VOCABULARY, False), n=4, logprobs=False, echoes=None, prompts=None
    )


CHAT_JOB = chat_job()
CHAT_STREAM, COMPLETION_STREAM = ChatStream(CHAT_JOB), completion_stream()


def chunk_of(is_chat: bool, index: int, text: str) -> bytes:
    if is_chat:
        return CHAT_STREAM.delta(AnswerDelta(index, (ContentText(text),) if text else ()))
    return COMPLETION_STREAM.delta(TextDelta(index, text))


@pytest.mark.parametrize("kind", ["chat.completion.chunk", "text_completion"])
@given(st.lists(st.tuples(st.integers(0, 3), st.text(min_size=1)), min_size=1))
def test_chunks_are_byte_for_byte_what_encoding_the_whole_gives(
    kind: str, pieces: list[tuple[int, str]]
) -> None:
    is_chat = kind == "chat.completion.chunk"
    fingerprint = CHAT_JOB.model.fingerprint if is_chat else "f"
    for index, text in pieces:
        content = {"delta": {"content": text}} if is_chat else {"text": text}
        whole = {
            "id": ANSWER_ID,
            "object": kind,
            "created": 7,
            "model": MODEL,
            "system_fingerprint": fingerprint,
            "choices": [{"index": index, **content, "logprobs": None, "finish_reason": None}],
        }
        expected = b"data: " + msgspec.json.encode(whole) + b"\n\n"
        assert chunk_of(is_chat, index, text) == expected
        assert chunk_of(is_chat, index, "") == b""


async def let_the_reader_catch_up() -> None:
    for _ in range(100):
        await asyncio.sleep(0)


class MoodySink:
    """Takes text when its schedule says so."""

    def __init__(self, moods: Iterator[bool]) -> None:
        self._moods = moods
        self.pieces: list[str] = []
        self.num_taken = 0

    def is_ready(self) -> bool:
        return next(self._moods, True)

    def take(self, delta: TextDelta) -> None:
        self.pieces.append(delta.text)
        self.num_taken += 1


@settings(deadline=None)
@given(st.lists(st.booleans(), max_size=40), st.lists(st.integers(1, 5), max_size=10))
def test_order_holds_whatever_the_sink_takes(moods: list[bool], pauses: list[int]) -> None:
    text = "The quick brown fox jumps over the lazy dog. STOP and more"

    async def scenario() -> None:
        generation = LinkGeneration(1, cancelled.append)
        backend = ScriptedBackend()
        backend.submit = lambda *_, **__: generation  # type: ignore[method-assign]
        job = GenerationJob(
            [array("I", [1, 2])],
            [SamplingParams(max_tokens=100, seed=1)],
            TextOptions(StopStrings(["STOP"])),
        )
        sink = MoodySink(iter(moods))
        text_generation = TextGeneration(backend, VOCABULARY, job, new_meter(1))

        async def read() -> None:
            async for event in text_generation.events(sink):
                if isinstance(event, TextDelta):
                    sink.pieces.append(event.text)
                    await asyncio.sleep(0)

        reading = asyncio.create_task(read())
        await asyncio.sleep(0)
        generation.put(PromptDone(1, 0, 0.0, 0.0))
        for position, byte in enumerate(text.encode()):
            if position in pauses or position > 20:
                await let_the_reader_catch_up()
            generation.put(ChoiceDelta(1, 0, pack_ids([byte])))
        await asyncio.wait_for(reading, 5)
        assert "".join(sink.pieces) == text.partition("STOP")[0]
        assert sink.num_taken > 0 or False in moods

    cancelled: list[int] = []
    asyncio.run(scenario())
    assert cancelled == [0]


def test_a_fault_in_a_taker_ends_its_own_generation_only() -> None:
    async def scenario() -> None:
        generation = LinkGeneration(1, lambda _: None)
        other = LinkGeneration(1, lambda _: None)

        def take(event: object) -> bool:
            raise RuntimeError("a bug of this request")

        generation.offer_to(take)
        for each in (generation, other):
            each.put(ChoiceDelta(1, 0, pack_ids([1]), "stop"))
        with pytest.raises(RuntimeError, match="a bug"):
            await anext(aiter(generation))
        assert len([event async for event in other]) == 1

    asyncio.run(scenario())


def open_silent_reader(gateway: RunningGateway, max_tokens: int) -> socket.socket:
    """Ask for a stream on a connection that ends with it; nobody reads so far."""
    body = {"prompt": "hi", "stream": True, "max_tokens": max_tokens}
    content = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: test\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    connection = socket.socket()
    connection.settimeout(30)
    # Before connecting: the kernel would keep megabytes for a reader that may still come.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(gateway.server.address)
    connection.sendall(head.encode() + content)
    return connection


def test_a_client_that_does_not_read_is_waited_for_and_misses_nothing() -> None:
    num_tokens = 40_000
    text = "0123456789" * (num_tokens // 10)

    def backend() -> ScriptedBackend:
        info = worker_info(2 * num_tokens)
        return ScriptedBackend(say(text), worker_info=info, holds_after=num_tokens)

    with running_gateway(make_backend=backend) as gateway:
        connection = open_silent_reader(gateway, num_tokens + 1)
        gateway.run(gateway.backend.holding.wait(), timeout_s=20)

        async def buffered_bytes() -> list[int]:
            state = gateway.server._uvicorn.server_state
            return [each.transport.get_write_buffer_size() for each in state.connections]

        # All tokens have come, far more than the kernel and the transport may hold.
        assert max(gateway.run(buffered_bytes())) < 128 * 1024
        gateway.loop.call_soon_threadsafe(gateway.backend.released.set)
        received = b"".join(iter(lambda: connection.recv(1 << 20), b""))
        connection.close()
    frames = [line for line in received.split(b"\n") if line.startswith(b"data: {")]
    pieces = [json.loads(frame[6:])["choices"][0]["text"] for frame in frames]
    assert "".join(pieces) == text


@pytest.mark.slow
def test_a_client_that_does_not_read_does_not_hold_up_the_end() -> None:
    num_tokens = 40_000

    def backend() -> ScriptedBackend:
        info = worker_info(2 * num_tokens)
        return ScriptedBackend(say("x" * num_tokens), worker_info=info, holds_after=num_tokens)

    with running_gateway(make_backend=backend) as gateway:
        connection = open_silent_reader(gateway, num_tokens + 1)
        gateway.run(gateway.backend.holding.wait(), timeout_s=20)
    # Leaving the server's context stops it twice and fails where it has not ended.
    connection.close()
