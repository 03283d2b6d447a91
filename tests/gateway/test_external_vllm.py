"""vLLM pools behind the gateway: both legs' shape, the truth of the answer, every fault."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import httpx
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
from support.gateway_server import byte_text_side
from support.mock_vllm import WORDS, Fabric, MockVllm, mock_vllm
from support.scripted_backend import ScriptedBackend
from twinfire.gateway.app import create_app_of_models
from twinfire.gateway.external.external_models import ExternalModels
from twinfire.gateway.external.external_pool import ExternalPool
from twinfire.gateway.hosted_model import HostedModel
from twinfire.gateway.served_model import ServedModel
from twinfire.gateway.settings import GatewaySettings
from twinfire.protocol.errors import InvalidRequest

TEXT = "".join(WORDS)
DEAD = "http://127.0.0.1:9"


@dataclass
class World:
    fabric: Fabric
    prefill: list[MockVllm]
    decode: list[MockVllm]
    gateway: ExternalGateway


@asynccontextmanager
async def world(num_prefill: int = 1, num_decode: int = 1, **table: object) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        fabric = Fabric()
        engines = [
            await stack.enter_async_context(mock_vllm(fabric))
            for _ in range(num_prefill + num_decode)
        ]
        prefill, decode = engines[:num_prefill], engines[num_prefill:]
        urls = [one.url for one in decode], [one.url for one in prefill]
        gateway = await stack.enter_async_context(
            external_gateway(external_table("vllm", *urls, **table))
        )
        yield World(fabric, prefill, decode, gateway)
        await until(lambda: not any(one.num_running for one in engines))
        assert fabric.num_held == 0
        gateway.assert_idle()


def run(test: Callable[[World], Awaitable[None]], *shape: int, **table: object) -> None:
    async def main() -> None:
        async with world(*shape, **table) as here:
            await test(here)

    asyncio.run(asyncio.wait_for(main(), 30))


def test_both_legs_are_shaped_and_the_answer_tells_the_truth() -> None:
    async def check(here: World) -> None:
        body = {
            **STREAM,
            "max_completion_tokens": 6,
            "min_tokens": 2,
            "stop": ["x"],
            "kv_transfer_params": {"remote_host": "evil"},
        }
        answer = await here.gateway.post(body, headers={"x-request-id": "abc"})
        assert answer.status == 200
        (asked,) = here.prefill[0].bodies
        assert asked["max_tokens"] == asked["max_completion_tokens"] == 1
        assert asked["stream"] is False
        assert not {"min_tokens", "stop", "stream_options"} & set(asked)
        assert asked["kv_transfer_params"]["do_remote_decode"] is True
        (given,) = here.decode[0].bodies
        params = given.pop("kv_transfer_params")
        assert params["remote_engine_id"] == here.prefill[0].engine_id
        all_usage = {"include_usage": True, "continuous_usage_stats": True}
        changed = {"model": "engine-model", "stream_options": all_usage}
        assert given == {k: v for k, v in body.items() if k != "kv_transfer_params"} | changed
        assert here.decode[0].headers[0]["x-request-id"] == "abc"
        events = answer.events()
        assert events[-1] == "[DONE]"
        assert answer.text() == TEXT
        assert {event["id"] for event in events[:-1]} == {"chatcmpl-abc"}
        assert {event["model"] for event in events[:-1]} == {"public"}
        assert events[-2]["usage"]["prompt_tokens_details"] == {"cached_tokens": 5}

    run(check)


def test_whole_answers_are_edited_too() -> None:
    async def check(here: World) -> None:
        here.decode[0].own_ids = True
        answer = await here.gateway.post(CHAT, headers={"x-request-id": "abc"})
        body = answer.json()
        assert (body["id"], body["model"]) == ("chatcmpl-abc", "public")
        assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 5}
        assert "kv_transfer_params" not in body
        assert body["choices"][0]["message"]["content"] == TEXT
        assert here.decode[0].num_pulled == 1

    run(check)


def test_a_missing_role_is_given() -> None:
    async def check(here: World) -> None:
        here.decode[0].omit_role = True
        events = (await here.gateway.post(STREAM)).events()
        roles = [c["delta"].get("role") for e in events[:-1] for c in e["choices"]]
        assert roles == ["assistant"] + [None] * (len(WORDS) - 1)

    run(check)


@pytest.mark.parametrize(
    "change", [{"n": 2}, {"prompt_logprobs": 1}], ids=["two answers", "prompt logprobs"]
)
def test_what_one_handle_cannot_carry_is_computed_in_one_place(change: dict) -> None:
    async def check(here: World) -> None:
        forged = {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "evil"}}
        answer = await here.gateway.post(CHAT | change | forged)
        assert answer.status == 200
        assert not here.prefill[0].bodies
        assert "kv_transfer_params" not in here.decode[0].bodies[0]

    run(check)


def test_batch_of_prompts_is_computed_in_one_place() -> None:
    async def check(here: World) -> None:
        body = {"model": "public", "prompt": ["one", "two"], "max_tokens": 2}
        assert (await here.gateway.post(body, PATHS[1])).status == 200
        assert not here.prefill[0].bodies

    run(check)


@pytest.mark.parametrize("status", [400, 404, 500])
def test_the_prefill_engines_fault_is_the_clients_answer(status: int) -> None:
    async def check(here: World) -> None:
        here.prefill[0].fail_status = status
        answer = await here.gateway.post(STREAM)
        assert answer.status == status
        assert answer.json()["error"]["message"] == "scripted failure"
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert not here.decode[0].bodies

    run(check)


def test_another_prefill_engine_is_asked_when_one_fails() -> None:
    async def check(here: World) -> None:
        here.prefill[0].fail_status = 500
        for _ in range(2):
            answer = await here.gateway.post(STREAM)
            assert answer.text() == TEXT
        assert here.prefill[1].bodies
        assert here.decode[0].num_pulled == 2

    run(check, 2)


def test_the_same_handle_goes_to_another_decode_engine() -> None:
    async def check(here: World) -> None:
        for engine in here.decode[:1]:
            engine.fail_status = 503
        for _ in range(2):
            assert (await here.gateway.post(STREAM)).text() == TEXT
        assert len(here.prefill[0].bodies) == 2
        assert here.decode[1].num_pulled == 2

    run(check, 1, 2)


def test_an_unreachable_decode_engine_is_passed_over() -> None:
    async def main() -> None:
        fabric = Fabric()
        async with mock_vllm(fabric) as prefill, mock_vllm(fabric) as decode:
            table = external_table("vllm", [DEAD, decode.url], [prefill.url])
            async with external_gateway(table) as gateway:
                dead = gateway.pool.engines.decode.servers[0]
                dead.health.passed()
                answer = await gateway.post(STREAM)
                assert answer.text() == TEXT
                assert decode.num_pulled == 1
                assert fabric.num_held == 0
                gateway.assert_idle()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_without_a_prefill_engine_decode_does_everything() -> None:
    async def main() -> None:
        async with mock_vllm(Fabric()) as decode:
            table = external_table("vllm", [decode.url], [DEAD])
            async with external_gateway(table) as gateway:
                assert (await gateway.post(STREAM)).text() == TEXT
                gateway.pool.engines.prefill.servers[0].health.passed()
                assert (await gateway.post(STREAM)).text() == TEXT
                assert decode.num_own_prompts == 2

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_decode_engine_that_breaks_before_its_first_event_is_replaced() -> None:
    async def check(here: World) -> None:
        for engine in here.decode:
            engine.error_after_chunks = 0
            engine.omit_role = True
        here.decode[1].error_after_chunks = None
        for _ in range(2):
            answer = await here.gateway.post(STREAM)
            assert (answer.status, answer.text()) == (200, TEXT)
        assert here.gateway.pool.tallies.retries == 2

    run(check, 1, 2)


def test_every_decode_engine_broken_is_a_status() -> None:
    async def check(here: World) -> None:
        here.decode[0].error_after_chunks = 0
        here.decode[0].omit_role = True
        answer = await here.gateway.post(STREAM)
        assert answer.status == 503
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    run(check)


@pytest.mark.parametrize("fault", ["die_after_chunks", "error_after_chunks"])
def test_after_bytes_a_fault_is_an_error_event_and_never_a_replay(fault: str) -> None:
    async def check(here: World) -> None:
        setattr(here.decode[0], fault, 3)
        begun = asyncio.Event()
        here.decode[0].chunk_gate = lambda number: begun if number == 1 else None
        async with here.gateway.session.post(here.gateway.url + PATHS[0], json=STREAM) as response:
            assert response.status == 200
            first = await response.content.readuntil(b"\n\n")
            begun.set()
            answer = Answer(200, {}, first + await response.read())
        events = answer.events()
        assert answer.text() == "".join(WORDS[:3])
        assert set(events[-2]["error"]) == {"message", "type", "param", "code"}
        assert events[-1] == "[DONE]"
        assert len(here.decode[0].bodies) == 1
        assert here.gateway.pool.tallies.broken_streams == 1

    run(check)


def test_a_client_that_leaves_while_the_prompt_is_computed() -> None:
    async def check(here: World) -> None:
        here.prefill[0].prompt_gate = asyncio.Event()
        posting = asyncio.create_task(here.gateway.post(STREAM))
        await here.prefill[0].arrived.wait()
        posting.cancel()
        await asyncio.wait_for(here.prefill[0].aborted.wait(), 1)
        assert not here.decode[0].bodies

    run(check)


def test_a_client_that_leaves_while_decode_waits_for_the_kv() -> None:
    async def check(here: World) -> None:
        here.decode[0].pull_gate = asyncio.Event()
        posting = asyncio.create_task(here.gateway.post(STREAM))
        await here.decode[0].arrived.wait()
        posting.cancel()
        await asyncio.wait_for(here.decode[0].aborted.wait(), 1)

    run(check)


def test_a_client_that_leaves_mid_stream() -> None:
    async def check(here: World) -> None:
        never = asyncio.Event()
        here.decode[0].chunk_gate = lambda number: never if number == 2 else None
        async with here.gateway.session.post(here.gateway.url + PATHS[0], json=STREAM) as response:
            await response.content.readuntil(b"\n\n")
        await asyncio.wait_for(here.decode[0].aborted.wait(), 1)

    run(check)


def test_a_prompt_whose_client_left_before_decode_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def check(here: World) -> None:
        connecting = asyncio.Event()
        post = aiohttp.ClientSession.post

        async def stuck(session: aiohttp.ClientSession, url: str, **sent: object) -> object:
            if url.startswith(here.decode[0].url) and not connecting.is_set():
                connecting.set()
                await asyncio.Event().wait()
            return await post(session, url, **sent)  # type: ignore[arg-type]

        posting = asyncio.create_task(here.gateway.post(STREAM))
        await here.prefill[0].arrived.wait()
        monkeypatch.setattr(aiohttp.ClientSession, "post", stuck)
        gate.set()
        await connecting.wait()
        assert here.fabric.num_held == 1
        posting.cancel()
        await until(lambda: here.fabric.num_held == 0)
        await until(lambda: here.gateway.pool.tallies.released == 1)
        assert here.decode[0].bodies[0]["max_tokens"] == 1

    gate = asyncio.Event()

    async def gated(here: World) -> None:
        here.prefill[0].prompt_gate = gate
        await check(here)

    run(gated)


def test_a_deadline_ends_the_request_with_504() -> None:
    async def check(here: World) -> None:
        here.prefill[0].prompt_gate = asyncio.Event()
        answer = await here.gateway.post(STREAM, headers={"x-request-timeout-ms": "50"})
        assert answer.status == 504
        await asyncio.wait_for(here.prefill[0].aborted.wait(), 1)

    run(check)


def test_requests_go_where_the_fewest_tokens_are() -> None:
    async def check(here: World) -> None:
        gate = asyncio.Event()
        for engine in here.decode:
            engine.chunk_gate = lambda number: gate if number else None
        big = {**STREAM, "max_tokens": 5000}
        posts = [asyncio.create_task(here.gateway.post(big))]
        await until(lambda: sum(len(one.bodies) for one in here.decode) == 1)
        for count in range(2, 5):
            posts.append(asyncio.create_task(here.gateway.post(STREAM)))
            await until(lambda count=count: sum(len(d.bodies) for d in here.decode) == count)
        gate.set()
        await asyncio.gather(*posts)
        assert sorted(len(one.bodies) for one in here.decode) == [1, 3]

    run(check, 1, 2)


def test_a_named_session_stays_at_home_until_home_is_much_busier() -> None:
    async def check(here: World) -> None:
        headers = {"x-session-id": "mine"}
        for _ in range(4):
            await here.gateway.post(STREAM, headers=headers)
        assert sorted(len(one.bodies) for one in here.decode) == [0, 4]
        assert sorted(len(one.bodies) for one in here.prefill) == [0, 4]
        busy = here.gateway.pool.engines.decode
        home = busy.choose(session="mine")
        assert home is not None
        entry = busy.charge(home, 100_000)
        assert busy.choose(session="mine") is not home
        entry.close()

    run(check, 2, 2)


def test_plain_engines_pass_bytes_through() -> None:
    async def main() -> None:
        async with mock_vllm(Fabric(), model="public") as one:
            table = external_table("vllm", [one.url], engine_model=None)
            async with external_gateway(table) as gateway:
                headers = {"x-request-id": "abc"}
                direct = await gateway.session.post(
                    one.url + PATHS[0], json=STREAM, headers=headers
                )
                answer = await gateway.post(STREAM, headers=headers)
                assert answer.content == await direct.read()
                gateway.assert_idle()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_an_unhealthy_engine_gets_nothing_until_it_is_back() -> None:
    async def check(here: World) -> None:
        here.decode[0].healthy = False
        here.prefill[0].healthy = False
        servers = here.gateway.pool.engines
        await until(lambda: not servers.decode.servers[0].health.is_healthy)
        await until(lambda: not servers.prefill.servers[0].health.is_healthy)
        answer = await here.gateway.post(STREAM)
        assert answer.status == 503
        assert answer.json()["error"]["code"] == "not_ready"
        here.decode[0].healthy = True
        await until(lambda: servers.decode.servers[0].health.is_healthy)
        assert (await here.gateway.post(STREAM)).text() == TEXT

    run(check, health_interval_s=0.02)


def test_overload_does_not_open_the_breaker_and_faults_do() -> None:
    async def check(here: World) -> None:
        decode = here.gateway.pool.engines.decode.servers[0]
        here.decode[0].fail_status = 429
        for _ in range(5):
            assert (await here.gateway.post(CHAT | {"n": 2})).status == 429
        assert decode.is_available()
        here.decode[0].fail_status = 500
        for _ in range(3):
            assert (await here.gateway.post(CHAT | {"n": 2})).status == 500
        assert not decode.is_available()

    run(check)


def test_a_key_that_the_engine_refuses_is_not_the_clients(tmp_path: Path) -> None:
    async def check(here: World) -> None:
        here.decode[0].fail_status = 401
        answer = await here.gateway.post(CHAT | {"n": 2}, headers={"authorization": "Bearer mine"})
        assert answer.status == 503
        assert here.decode[0].headers[0]["authorization"] == "Bearer ours"

    key_file = tmp_path / "key"
    key_file.write_text("ours\n")
    run(check, api_key_file=str(key_file))


def test_unknown_names_and_bad_bodies() -> None:
    async def check(here: World) -> None:
        assert (await here.gateway.post(CHAT | {"model": "nope"})).status == 404
        assert (await here.gateway.post(CHAT | {"n": "two"})).status == 400
        assert (await here.gateway.post(CHAT | {"model": 7})).status == 400
        own = await here.gateway.post(CHAT | {"model": "t"})
        assert own.json()["model"] == "t"
        assert len(here.prefill[0].bodies) == 0

    run(check)


def test_the_one_external_model_need_not_be_named_where_there_is_no_other() -> None:
    async def main() -> None:
        async with mock_vllm(Fabric()) as one:
            pool = ExternalPool(
                ("public",), external_table("vllm", [one.url], health_interval_s=0.02)
            )
            external = ExternalModels([pool])
            app = create_app_of_models(GatewaySettings(), [], external=external)
            await external.start()
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://g") as client:
                nameless = {name: value for name, value in CHAT.items() if name != "model"}
                answer = (await client.post(PATHS[0], json=nameless)).json()
                assert answer["model"] == "public"
                tokenize = await client.post("/tokenize", json={"prompt": "x"})
                assert tokenize.json()["error"]["code"] == "external_model"
                assert (await client.get("/health")).json()["models"] == {"public": "ready"}
                one.healthy = False
                await until(lambda: pool.unready_reason is not None)
                health = await client.get("/health")
                assert health.json()["error"]["message"] == "no engine is healthy"
            await external.close()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_names_that_two_models_have_are_refused() -> None:
    pools = [ExternalPool(("a", "b"), external_table("vllm", [DEAD])) for _ in range(2)]
    with pytest.raises(InvalidRequest, match="two models are called `a`"):
        ExternalModels(pools)
    own = HostedModel.of(ServedModel(("b",), byte_text_side()), ScriptedBackend())

    async def main() -> None:
        create_app_of_models(GatewaySettings(), [own], external=ExternalModels(pools[:1]))

    with pytest.raises(InvalidRequest, match="two models are called `b`"):
        asyncio.run(main())
