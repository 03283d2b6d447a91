"""SGLang pools behind the gateway: rooms, the race of both legs, the truth of the answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import pytest

from support.external_gateway import (
    CHAT,
    PATHS,
    STREAM,
    Answer,
    ExternalGateway,
    external_gateway,
    external_table,
    until,
)
from support.mock_sglang import Bootstrap, MockSglang, mock_sglang
from support.mock_vllm import WORDS

TEXT = "".join(WORDS)


@dataclass
class World:
    bootstrap: Bootstrap
    prefill: list[MockSglang]
    decode: list[MockSglang]
    gateway: ExternalGateway


@asynccontextmanager
async def world(num_prefill: int = 1, num_decode: int = 1) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        rooms = Bootstrap()
        ports = tuple(range(9000, 9000 + num_prefill))
        prefill = [
            await stack.enter_async_context(mock_sglang(rooms, "prefill", bootstrap_port=port))
            for port in ports
        ]
        decode = [
            await stack.enter_async_context(mock_sglang(rooms, "decode")) for _ in range(num_decode)
        ]
        table = external_table(
            "sglang",
            [one.url for one in decode],
            [one.url for one in prefill],
            bootstrap_ports=ports,
        )
        gateway = await stack.enter_async_context(external_gateway(table))
        yield World(rooms, prefill, decode, gateway)
        await until(lambda: not any(one.num_running for one in (*prefill, *decode)))
        assert rooms.num_inside == 0
        gateway.assert_idle()


def run(test: Callable[[World], Awaitable[None]], *shape: int) -> None:
    async def main() -> None:
        async with world(*shape) as here:
            await test(here)

    asyncio.run(asyncio.wait_for(main(), 30))


def test_both_legs_meet_in_one_room_and_the_answer_tells_the_truth() -> None:
    async def check(here: World) -> None:
        body = STREAM | {"bootstrap_host": "evil", "bootstrap_room": 7}
        answer = await here.gateway.post(body, headers={"x-request-id": "abc"})
        assert answer.text() == TEXT
        asked, given = here.prefill[0].bodies[0], here.decode[0].bodies[0]
        for name, value in (("host", "127.0.0.1"), ("port", 9000)):
            assert asked[f"bootstrap_{name}"] == given[f"bootstrap_{name}"] == value
        assert asked["bootstrap_room"] == given["bootstrap_room"] != 7
        events = answer.events()[:-1]
        assert {event["id"] for event in events} == {"chatcmpl-abc"}
        assert {event["model"] for event in events} == {"public"}
        assert events[0]["choices"][0]["delta"]["role"] == "assistant"
        assert events[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 5}

    run(check)


def test_batches_get_one_room_for_each_sequence() -> None:
    async def check(here: World) -> None:
        body = {"model": "public", "prompt": ["one", "two"], "n": 2}
        answer = await here.gateway.post(body, PATHS[1])
        assert len(answer.json()["choices"]) == 4
        assert answer.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 5}
        assert len(set(here.decode[0].bodies[0]["bootstrap_room"])) == 4

    run(check)


def test_a_slow_prefill_answer_does_not_hold_up_the_tokens() -> None:
    async def check(here: World) -> None:
        here.prefill[0].answer_gate = asyncio.Event()
        async with here.gateway.session.post(here.gateway.url + PATHS[0], json=STREAM) as response:
            first = await response.content.readuntil(b"\n\n")
            assert b"Twin" in first
            here.prefill[0].answer_gate.set()
            assert b'"cached_tokens":5' in await response.read()

    run(check)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [400, 500])
def test_a_failing_prefill_ends_the_waiting_decode_at_once(status: int, stream: bool) -> None:
    async def check(here: World) -> None:
        prefill, decode = here.prefill[0], here.decode[0]
        prefill.fail_status = status
        prefill.fail_gate = asyncio.Event()
        posting = asyncio.create_task(here.gateway.post(CHAT | {"stream": stream}))
        await decode.arrived.wait()
        prefill.fail_gate.set()
        answer = await asyncio.wait_for(posting, 2)
        assert answer.status == status
        assert answer.json()["error"]["message"] == "scripted failure"
        await asyncio.wait_for(decode.aborted.wait(), 1)

    run(check)


def test_a_failing_decode_ends_the_waiting_prefill_at_once() -> None:
    async def check(here: World) -> None:
        here.decode[0].fail_status = 400
        here.decode[0].fail_gate = asyncio.Event()
        posting = asyncio.create_task(here.gateway.post(STREAM))
        await here.prefill[0].arrived.wait()
        here.decode[0].fail_gate.set()
        assert (await posting).status == 400
        await asyncio.wait_for(here.prefill[0].aborted.wait(), 1)

    run(check)


def test_a_decode_engine_is_not_blamed_for_its_peer() -> None:
    async def check(here: World) -> None:
        prefill, decode = here.prefill[0], here.decode[0]
        decode.fail_status, prefill.fail_status = 500, 400
        server = here.gateway.pool.engines.decode.servers[0]
        for _ in range(4):
            prefill.fail_gate = asyncio.Event()
            posting = asyncio.create_task(here.gateway.post(STREAM))
            await prefill.arrived.wait()
            await decode.arrived.wait()
            await until(lambda: not decode.num_running)
            prefill.fail_gate.set()
            assert (await posting).status == 400
            prefill.arrived.clear()
            decode.arrived.clear()
        assert server.is_available()

    run(check)


def test_both_legs_are_tried_anew_elsewhere() -> None:
    async def check(here: World) -> None:
        here.prefill[0].fail_status = 500
        here.decode[0].fail_status = 503
        for _ in range(3):
            assert (await here.gateway.post(STREAM)).text() == TEXT

    run(check, 2, 2)


def test_after_bytes_a_dead_decode_is_an_error_event() -> None:
    async def check(here: World) -> None:
        here.decode[0].die_after_chunks = 2
        here.decode[0].death_gate = asyncio.Event()
        async with here.gateway.session.post(here.gateway.url + PATHS[0], json=STREAM) as response:
            first = await response.content.readuntil(b"\n\n")
            here.decode[0].death_gate.set()
            answer = Answer(200, {}, first + await response.read())
        events = answer.events()
        assert answer.text() == "".join(WORDS[:2])
        assert set(events[-2]["error"]) == {"message", "type", "param", "code"}
        assert events[-1] == "[DONE]"
        assert len(here.decode[0].bodies) == 1

    run(check)


def test_a_client_that_leaves_takes_both_legs_with_it() -> None:
    async def check(here: World) -> None:
        here.prefill[0].prompt_gate = asyncio.Event()
        posting = asyncio.create_task(here.gateway.post(STREAM))
        await here.prefill[0].arrived.wait()
        await here.decode[0].arrived.wait()
        posting.cancel()
        await asyncio.wait_for(here.prefill[0].aborted.wait(), 1)
        await asyncio.wait_for(here.decode[0].aborted.wait(), 1)

    run(check)
