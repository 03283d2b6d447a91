"""The edge: whose request goes where, what moves on when a region fails, and bytes untouched."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from hashlib import sha256

import aiohttp
import pytest
from openai import AsyncOpenAI

from support.edge_server import (
    SESSION,
    RawRegion,
    RunningEdge,
    raw_region,
    running_edge,
    saying,
)
from support.external_gateway import until
from support.gateway_server import MODEL, running_gateway
from support.raw_http import open_post, request
from support.scripted_backend import say
from twinfire.cli.main import build_parser, main
from twinfire.gateway.edge.edge_settings import EdgeSettings, RegionAddress, parse_region
from twinfire.gateway.edge.region import Region
from twinfire.gateway.edge.session_key import SessionKey, session_key
from twinfire.protocol.errors import InvalidRequest

CHAT = "/v1/chat/completions"
DEAD = "http://127.0.0.1:9"
UNAVAILABLE = b"HTTP/1.1 503 No\r\ncontent-length: 5\r\nx-own: 1\r\n\r\nlater"
EVENTS = (
    b'data: {"a":"\xe5\x8f\x8c\xe5\xad\x90"}\n\n: keep-alive\n\n'
    b"event: x\r\ndata:no space\r\n\r\ndata: [DONE]\n\n"
)
EVENT_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\nkeep-alive: timeout=5\r\nconnection: x-hop\r\nx-hop: 1\r\n\r\n"
)


@dataclass
class World:
    edge: RunningEdge
    regions: dict[str, RawRegion]
    session: aiohttp.ClientSession

    @property
    def home(self) -> RawRegion:
        return self.regions[self.edge.home()]

    @property
    def other(self) -> RawRegion:
        (name,) = set(self.regions) - {self.edge.home()}
        return self.regions[name]

    def name_of(self, region: RawRegion) -> str:
        return next(name for name, one in self.regions.items() if one is region)

    async def post(
        self, body: bytes = b"{}", headers: dict[str, str] | None = None
    ) -> tuple[int, bytes, dict[str, str]]:
        sent = SESSION if headers is None else headers
        async with self.session.post(self.edge.url + CHAT, data=body, headers=sent) as response:
            content = await response.read()
            return response.status, content, {k.lower(): v for k, v in response.headers.items()}


@asynccontextmanager
async def world(**settings: object) -> AsyncIterator[World]:
    async with (
        raw_region() as us,
        raw_region() as eu,
        running_edge({"us": us.url, "eu": eu.url}, **settings) as edge,
        aiohttp.ClientSession() as session,
    ):
        yield World(edge, {"us": us, "eu": eu}, session)
        await until(lambda: not any(region.num_running for region in edge.edge.regions))


def run(test: Callable[[World], Awaitable[None]], **settings: object) -> None:
    async def start() -> None:
        async with world(**settings) as here:
            await test(here)

    asyncio.run(asyncio.wait_for(start(), 30))


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in pieces) + b"0\r\n\r\n"


def test_a_session_stays_in_its_region_and_all_sessions_spread() -> None:
    async def check(here: World) -> None:
        regions = set()
        for number in range(40):
            headers = {"x-session-id": f"s{number}"}
            answers = [await here.post(headers=headers) for _ in range(2)]
            (name,) = {answer[2]["x-twinfire-region"] for answer in answers}
            assert name == here.edge.home(f"s{number}")
            regions.add(name)
        assert regions == {"us", "eu"}

    run(check)


def test_a_region_more_moves_only_its_own_sessions() -> None:
    three = [Region(RegionAddress(name, "")) for name in ("a", "b", "c")]
    keys = [SessionKey(b"k", str(number)) for number in range(300)]
    before = [key.ranked(three[:2])[0] for key in keys]
    after = [key.ranked(three)[0] for key in keys]
    moved = [new for old, new in zip(before, after, strict=True) if old is not new]
    assert 60 < len(moved) < 140
    assert set(moved) == {three[2]}


def test_accounts_and_body_keys_count() -> None:
    first = session_key({"authorization": "Bearer a"}, b'{"prompt_cache_key": "chat"}')
    assert first.session == "chat"
    assert first.account == sha256(b"Bearer a").digest()
    assert session_key({"authorization": "Bearer b"}, None).account != first.account
    assert session_key({"x-session-id": "own"}, b'{"prompt_cache_key": "chat"}').session == "own"
    assert session_key({}, '{"prompt_cache_key": "双子"}'.encode()).session.isascii()
    assert session_key({}, b'{"prompt_cache_key": 1}').session


def test_a_minted_session_goes_down_and_back() -> None:
    async def check(here: World) -> None:
        _, _, headers = await here.post(headers={})
        minted = headers["x-session-affinity"]
        (asked,) = here.regions[headers["x-twinfire-region"]].requests
        assert asked.headers["x-session-affinity"] == minted
        again = await here.post(headers={"x-session-affinity": minted})
        assert again[2]["x-twinfire-region"] == headers["x-twinfire-region"]

    run(check)


def test_a_session_that_cannot_be_one_is_refused() -> None:
    async def check(here: World) -> None:
        status, body, _ = await here.post(headers={"x-session-id": "x" * 300})
        assert status == 400
        assert b"invalid_session" in body

    run(check)


def test_events_pass_through_byte_for_byte() -> None:
    async def check(here: World) -> None:
        async def answer(writer: asyncio.StreamWriter) -> None:
            writer.write(EVENT_HEAD)
            for byte in EVENTS:
                writer.write(b"1\r\n%c\r\n" % byte)
                await writer.drain()
            writer.write(b"0\r\n\r\n")

        here.home.answering = answer
        status, body, headers = await here.post()
        assert (status, body) == (200, EVENTS)
        assert headers["content-type"] == "text/event-stream; charset=utf-8"
        assert not {"keep-alive", "x-hop"} & set(headers)

    run(check)


def test_each_event_is_passed_on_as_it_comes() -> None:
    async def check(here: World) -> None:
        more = asyncio.Event()

        async def answer(writer: asyncio.StreamWriter) -> None:
            writer.write(EVENT_HEAD + chunked(b"data: 1\n\n")[:-5])
            await more.wait()
            writer.write(chunked(b"data: 2\n\n"))

        here.home.answering = answer
        async with here.session.post(here.edge.url + CHAT, data=b"{}", headers=SESSION) as response:
            assert await response.content.readany() == b"data: 1\n\n"
            more.set()
            assert await response.read() == b"data: 2\n\n"

    run(check)


def test_request_headers_and_body_arrive_as_they_were() -> None:
    async def check(here: World) -> None:
        body = b'{"odd" :  1.0e0}'
        headers = {**SESSION, "authorization": "Bearer k", "te": "trailers", "x-own": "é"}
        await here.post(body, headers | {"connection": "keep-alive, x-own2", "x-own2": "1"})
        (got,) = [one for region in here.regions.values() for one in region.requests]
        assert got.body == body
        assert got.headers["authorization"] == "Bearer k"
        assert got.headers["x-own"] == "é"
        assert got.headers["x-forwarded-for"] == "127.0.0.1"
        assert got.headers["host"] != f"{here.edge.host}:{here.edge.port}"
        assert not {"te", "x-own2"} & set(got.headers)

    run(check)


def test_compressed_bodies_are_left_as_they_are() -> None:
    async def check(here: World) -> None:
        packed = b"\x1f\x8bnot really gzip"
        here.home.answering = saying(
            b"HTTP/1.1 200 OK\r\ncontent-encoding: x-own\r\ncontent-length: %d\r\n\r\n"
            % len(packed)
            + packed
        )
        headers = {**SESSION, "content-encoding": "gzip"}
        _, body, _ = await here.post(packed, headers)
        assert body == packed
        assert here.home.requests[0].body == packed

    run(check)


def test_an_unreachable_home_is_passed_over_and_returned_to() -> None:
    async def start() -> None:
        async with (
            raw_region() as alive,
            raw_region() as late,
            running_edge({"us": DEAD, "eu": alive.url}, health_interval_s=0.02) as edge,
            aiohttp.ClientSession() as session,
        ):
            dead = next(one for one in edge.edge.regions if one.name == "us")
            name = next(s for s in map(str, range(99)) if edge.home(s) == "us")
            headers = {"x-session-id": name}

            async def asked() -> str:
                async with session.post(edge.url + CHAT, data=b"{}", headers=headers) as response:
                    assert response.status == 200
                    return response.headers["x-twinfire-region"]

            dead.health.passed()
            assert await asked() == "eu"
            await until(lambda: not dead.health.is_healthy)
            assert await asked() == "eu"
            dead.url = late.url
            await until(lambda: dead.health.is_healthy)
            assert await asked() == "us"

    asyncio.run(asyncio.wait_for(start(), 30))


def test_503_before_any_work_moves_on_and_the_last_one_is_told() -> None:
    async def check(here: World) -> None:
        here.home.answering = saying(UNAVAILABLE)
        status, _, headers = await here.post()
        assert (status, headers["x-twinfire-region"]) == (200, here.name_of(here.other))
        here.other.answering = saying(UNAVAILABLE)
        status, body, headers = await here.post()
        assert (status, body, headers["x-own"]) == (503, b"later", "1")

    run(check)


@pytest.mark.parametrize(
    "head", [b"HTTP/1.1 500 No\r\ncontent-length: 1\r\n\r\nx", b""], ids=["500", "no answer"]
)
def test_what_may_have_been_begun_is_never_repeated(head: bytes) -> None:
    async def check(here: World) -> None:
        here.home.answering = saying(head)
        status, body, _ = await here.post()
        assert status == (500 if head else 502)
        assert head or b'"code":"region_failed"' in body
        assert not here.other.requests

    run(check)


def test_an_answer_that_is_cut_is_not_ended_well() -> None:
    async def check(here: World) -> None:
        here.home.answering = saying(EVENT_HEAD + b"9\r\ndata: 1\n\n\r\n")
        with pytest.raises(aiohttp.ClientError):
            await here.post()
        assert not here.other.requests

    run(check)


def test_a_client_that_leaves_ends_the_request_at_its_gateway() -> None:
    async def check(here: World) -> None:
        async def answer(writer: asyncio.StreamWriter) -> None:
            writer.write(EVENT_HEAD)
            await asyncio.Event().wait()

        for answering in (answer, lambda writer: asyncio.Event().wait()):
            here.home.answering = answering
            here.home.arrived.clear()
            here.home.closed.clear()
            posting = asyncio.create_task(here.post())
            await here.home.arrived.wait()
            posting.cancel()
            await asyncio.wait_for(here.home.closed.wait(), 1)

    run(check)


def test_a_slow_client_slows_its_gateway() -> None:
    async def check(here: World) -> None:
        sent = 0

        async def answer(writer: asyncio.StreamWriter) -> None:
            nonlocal sent
            writer.write(EVENT_HEAD)
            while True:
                writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
                await writer.drain()
                sent += 65536

        here.home.answering = answer
        reader, writer = await asyncio.open_connection(here.edge.host, here.edge.port, limit=1024)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-session-id: s\r\n"
            b"content-length: 2\r\n\r\n{}"
        )
        await reader.read(1)
        before = -1
        while sent != before:
            before = sent
            await asyncio.sleep(0.2)
        assert 0 < sent < 64 << 20
        writer.transport.abort()
        await asyncio.wait_for(here.home.closed.wait(), 1)

    run(check)


def test_long_bodies_stream_and_too_long_ones_are_refused() -> None:
    async def check(here: World) -> None:
        body = bytes(range(256)) * 300
        assert (await here.post(body))[0] == 200
        assert here.home.requests[0].body == body
        status, answer, _ = await here.post(body * 4)
        assert status == 413
        assert b'"code":"request_too_large"' in answer

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(4):
                yield body

        async with here.session.post(here.edge.url + CHAT, data=pieces()) as response:
            assert response.status == 413
        assert len(here.home.requests) == 1

    run(check, max_body_bytes=100_000, max_repeatable_bytes=1000)


def test_a_client_that_waits_to_be_asked_for_its_body() -> None:
    async def check(here: World) -> None:
        reader, writer = await asyncio.open_connection(here.edge.host, here.edge.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-session-id: s\r\n"
            b"expect: 100-continue\r\ncontent-length: 2\r\n\r\n"
        )
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"{}")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
        assert here.home.requests[0].body == b"{}"
        assert "expect" not in here.home.requests[0].headers
        writer.close()

    run(check)


def test_a_streamed_body_is_sent_once() -> None:
    async def check(here: World) -> None:
        here.home.answering = saying(UNAVAILABLE)
        assert (await here.post(b"x" * 5000))[0] == 503
        assert not here.other.requests

    run(check, max_repeatable_bytes=1000)


def test_a_silent_gateway_is_a_504() -> None:
    async def check(here: World) -> None:
        here.home.answering = lambda writer: asyncio.Event().wait()
        status, body, _ = await here.post()
        assert status == 504
        assert set(json.loads(body)["error"]) == {*("message", "type", "param", "code")}

    run(check, silence_timeout_s=0.1)


def test_its_own_paths() -> None:
    async def check(here: World) -> None:
        await here.post()
        async with here.session.get(here.edge.url + "/health") as response:
            assert response.status == 200
            assert (await response.json())["regions"] == {"us": True, "eu": True}
        async with here.session.get(here.edge.url + "/metrics") as response:
            text = await response.text()
        name = here.edge.home()
        assert f'twinfire:edge_answers_total{{region="{name}",status="200"}} 1.0' in text
        async with here.session.post(here.edge.url + "/cluster/scale") as response:
            assert response.status == 404
        for region in here.regions.values():
            region.healthy = False
        await until(lambda: not any(one.health.is_healthy for one in here.edge.edge.regions))
        async with here.session.get(here.edge.url + "/health") as response:
            assert response.status == 503
        status, body, headers = await here.post()
        assert (status, headers["retry-after"]) == (503, "1")
        assert b'"code":"no_region"' in body

    run(check, health_interval_s=0.02)


def test_before_real_gateways_the_bytes_are_theirs() -> None:
    with running_gateway() as us, running_gateway() as eu:
        for gateway in (us, eu):
            gateway.backend.script = say("twice the fire, 双子")

        async def check() -> None:
            async with running_edge({"us": us.url, "eu": eu.url}) as edge:
                body: dict[str, object] = {
                    "messages": [{"role": "user", "content": "hi"}],
                    "stream": True,
                    "seed": 1,
                }
                address = edge.host, edge.port
                headers = {"x-session-id": "s", "x-request-id": "r"}
                home = {"us": us, "eu": eu}[edge.home()]
                through = await asyncio.to_thread(request, address, "POST", CHAT, body, headers)
                direct = await asyncio.to_thread(
                    request, home.server.address, "POST", CHAT, body, headers
                )
                # Only the time of creation may differ.
                assert len(through.body) == len(direct.body)
                assert through.events()[1]["choices"] == direct.events()[1]["choices"]  # type: ignore[index]
                assert through.headers["x-twinfire-region"] == edge.home()
                client = AsyncOpenAI(base_url=edge.url + "/v1", api_key="k")
                async with client:
                    answer = await client.chat.completions.create(
                        model=MODEL, messages=[{"role": "user", "content": "hi"}]
                    )
                assert answer.choices[0].message.content == "twice the fire, 双子"

        asyncio.run(asyncio.wait_for(check(), 30))


def test_leaving_reaches_the_real_gateway() -> None:
    with running_gateway() as gateway:
        gateway.backend.script = say("a long story")
        gateway.backend.holds_after = 3

        async def check() -> None:
            async with running_edge({"us": gateway.url}) as edge:
                body: dict[str, object] = {"prompt": "x", "stream": True}
                opened = await asyncio.to_thread(
                    open_post, (edge.host, edge.port), "/v1/completions", body
                )
                with closing(opened):
                    await asyncio.to_thread(gateway.run, gateway.backend.holding.wait())
                await asyncio.to_thread(gateway.run, gateway.backend.idle.wait(), 1)

        asyncio.run(asyncio.wait_for(check(), 30))


def test_the_command_line() -> None:
    args = build_parser("edge").parse_args(["edge", "--region", "us=http://a:1", "--port", "0"])
    assert args.region == ["us=http://a:1"]
    assert parse_region("us=http://a:1/") == RegionAddress("us", "http://a:1")
    for bad in ("us", "=http://a", "us=ftp://a", "us=http://a/v1"):
        with pytest.raises(InvalidRequest):
            parse_region(bad)
    assert main(["edge", "--region", "us=http://a", "--region", "us=http://b"]) == 1
    assert EdgeSettings(()).max_body_bytes == 16 << 20
