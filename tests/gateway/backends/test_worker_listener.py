"""Who may join, who is refused and told why, and who is cut off."""

from __future__ import annotations

import asyncio
import os
import stat
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from support.scripted_worker import FINGERPRINT, MODEL, ScriptedWorker, scripted_info
from support.tls_files import GATEWAY, STRANGER, WORKER
from support.worker_pool import QUICK, SECRET, PoolWithListener, until, worker_pool
from twinfire.gateway.backends.worker_listener import WorkerListener
from twinfire.gateway.listening import AddressUnavailable
from twinfire.protocol.addresses import TcpAddress, UnixAddress
from twinfire.protocol.errors import InvalidRequest, WorkerLost
from twinfire.protocol.link_auth import AuthError, LinkHandshake
from twinfire.protocol.messages import (
    DrainWorker,
    Failed,
    Fingerprint,
    Load,
    Loading,
    Ready,
    Refused,
    SetRole,
    StepFrame,
    Submit,
    WorkerInfo,
)
from twinfire.protocol.tls import client_context


async def refusal_of(pool: PoolWithListener, info: WorkerInfo) -> str:
    worker = await ScriptedWorker.dial(pool.address, info, SECRET)
    worker.say(Ready(info))
    message = (await worker.expect(Refused)).message
    async with asyncio.timeout(5):
        await worker.closed.wait()
    return message


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\xff" * 4096,
        b"GET / HTTP/1.1\r\n\r\n",
        LinkHandshake(b"other", initiator=True).start(),
    ],
    ids=["silence", "length", "http", "half"],
)
def test_a_hostile_connection_harms_nobody(tmp_path: Path, garbage: bytes) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            worker = await pool.join("m")
            assert isinstance(pool.address, UnixAddress)
            reader, writer = await asyncio.open_unix_connection(pool.address.path)
            writer.write(garbage)
            if garbage[:1] in (b"\xff", b"G"):
                async with asyncio.timeout(5):
                    await reader.read()
                    assert reader.at_eof()
            consumer = pool.submit()
            submit = await worker.expect(Submit)
            worker.accept(submit.request_id, {0: [5]}, finish="stop")
            await consumer.end()
            assert consumer.tokens() == [5]
            writer.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("secret", [None, b"a secret of somebody else"])
def test_without_the_secret_nobody_gets_a_link(tmp_path: Path, secret: bytes | None) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            with pytest.raises(AuthError):
                await ScriptedWorker.dial(pool.address, scripted_info("m"), secret)
            assert len(pool.backend.registry) == 0

    asyncio.run(scenario())


def test_a_frame_that_is_broken_closes_its_link_only(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            other = await pool.join("m1")
            worker = await pool.join("m2")
            worker.writer.write(b"\x05\x00\x00\x00hello")
            await until(lambda: pool.backend.registry.get("m2") is None)
            assert pool.backend.registry.get("m1") is not None
            assert not other.closed.is_set()

    asyncio.run(scenario())


def test_unix_sockets_are_of_this_user_only_and_replaced_when_left_behind(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            assert isinstance(pool.address, UnixAddress)
            mode = stat.S_IMODE(os.stat(pool.address.path).st_mode)
            assert mode == 0o600
        async with worker_pool(tmp_path) as pool:
            await pool.join("m")

    asyncio.run(scenario())


def test_an_open_address_without_protection_is_refused() -> None:
    async def scenario() -> None:
        with pytest.raises(InvalidRequest, match="secret"):
            await WorkerListener("g", None).listen(TcpAddress("0.0.0.0", 0))
        taken = await WorkerListener("g", None).listen(TcpAddress("127.0.0.1", 0))
        assert isinstance(taken, TcpAddress)
        with pytest.raises(AddressUnavailable):
            await WorkerListener("g", None).listen(taken)

    asyncio.run(scenario())


def test_over_tcp_certificates_are_asked_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            listener = WorkerListener("g", SECRET, GATEWAY)
            listener.add_pool(pool.backend.registry)
            address = await listener.listen(TcpAddress("127.0.0.1", 0))
            info = scripted_info("m")
            worker = await ScriptedWorker.join(address, info, SECRET, client_context(WORKER))
            await until(lambda: pool.backend.registry.get("m") is not None)
            consumer = pool.submit()
            submit = await worker.expect(Submit)
            worker.accept(submit.request_id, {0: [5]}, finish="stop")
            await consumer.end()
            assert consumer.tokens() == [5]
            with pytest.raises((OSError, AuthError)):
                await ScriptedWorker.dial(address, info, SECRET, client_context(STRANGER))
            assert isinstance(address, TcpAddress)
            reader, writer = await asyncio.open_connection("127.0.0.1", address.port)
            writer.write(LinkHandshake(SECRET, initiator=True).start())
            with suppress(ConnectionError):
                assert await reader.read(32) in (b"", b"\x15\x03\x03\x00\x02\x02\x46")
            writer.close()
            await listener.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model_key": "others"}, "model_key"),
        ({"weight_format": "q4_0"}, "weight_format"),
        ({"kv_groups": ("target:9:2:16:bf16",)}, "kv_groups"),
        ({"kernel_version": "kernels 2"}, "kernel_version"),
    ],
)
@pytest.mark.parametrize("given", [True, False])
def test_a_worker_that_computes_something_else_is_told_what_differs(
    tmp_path: Path, change: dict[str, object], field: str, given: bool
) -> None:
    async def scenario() -> None:
        expected = FINGERPRINT if given else None
        async with worker_pool(tmp_path, expected=expected) as pool:
            if not given:
                await pool.join("m")
            other: Fingerprint = msgspec.structs.replace(FINGERPRINT, **change)
            message = await refusal_of(pool, scripted_info("odd", fingerprint=other))
            assert field in message
            assert repr(change[field]) in message
            assert all(
                name not in message for name in FINGERPRINT.__struct_fields__ if name != field
            )
            assert pool.backend.registry.get("odd") is None
            if given:
                assert field in (pool.backend.unready_reason or "")

    asyncio.run(scenario())


def test_other_reasons_for_a_refusal(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            assert "block_size is 0" in await refusal_of(pool, scripted_info("a", block_size=0))
            assert MODEL in await refusal_of(pool, scripted_info("a", model="another"))
            await pool.join("m")
            assert "vocab_size" in await refusal_of(pool, scripted_info("a", vocab_size=7))
            assert "only the pool" in await refusal_of(pool, scripted_info("a", fingerprint=None))

    asyncio.run(scenario())


def test_an_empty_pool_takes_a_new_version(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            worker = await pool.join("m")
            worker.die()
            await until(lambda: len(pool.backend.registry) == 0)
            newer = msgspec.structs.replace(FINGERPRINT, kernel_version="kernels 2")
            await pool.join("n", fingerprint=newer)

    asyncio.run(scenario())


def test_an_unready_pool_says_why(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            backend = pool.backend
            assert backend.unready_reason == f"no worker has joined the pool of {MODEL}"
            with pytest.raises(WorkerLost, match="no worker has joined"):
                pool.submit()
            worker = await ScriptedWorker.dial(pool.address, scripted_info("m"), SECRET)
            worker.say(Loading("weights"))
            await until(lambda: backend.unready_reason == "loading: weights")
            worker.say(Failed("no memory"))
            await until(lambda: backend.unready_reason == "no memory")
            worker.die()
            worker = await pool.join("m")
            assert backend.unready_reason is None
            assert backend.worker_info is not None
            worker.say(Ready(msgspec.structs.replace(worker.info, draining=True)))
            await until(lambda: backend.unready_reason is not None)
            assert "draining" in (backend.unready_reason or "")
            worker.die()
            await until(lambda: backend.worker_info is None)
            assert "left" in (backend.unready_reason or "")

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["freeze", "stall"])
def test_a_worker_without_life_is_cut_off_and_may_join_again(tmp_path: Path, how: str) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            worker = await pool.join("m")
            consumer = pool.submit()
            await worker.expect(Submit)
            getattr(worker, how)()
            await until(lambda: pool.backend.registry.get("m") is None)
            reason = {"freeze": "said nothing", "stall": "stood still"}[how]
            assert reason in (pool.backend.unready_reason or "")
            worker.die()
            again = await pool.join("m")
            submit = await again.expect(Submit)
            again.accept(submit.request_id, {0: [5]}, finish="stop")
            await consumer.end()
            assert consumer.tokens() == [5]

    asyncio.run(scenario())


def test_an_idle_worker_may_stand_still(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            worker = await pool.join("m")
            worker.stall()
            await asyncio.sleep(QUICK.stall_s + 0.3)
            assert pool.backend.registry.get("m") is not None

    asyncio.run(scenario())


def test_a_gateway_that_stood_still_blames_nobody(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            worker = await pool.join("m")
            pool.submit()
            await worker.expect(Submit)
            time.sleep(2 * QUICK.stall_s)
            await asyncio.sleep(0.2)
            assert pool.backend.registry.get("m") is not None

    asyncio.run(scenario())


def test_a_worker_that_dials_again_replaces_its_old_link(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            old = await pool.join("m")
            consumer = pool.submit()
            await old.expect(Submit)
            new = await ScriptedWorker.join(pool.address, old.info, SECRET)
            async with asyncio.timeout(5):
                await old.closed.wait()
            submit = await new.expect(Submit)
            new.accept(submit.request_id, {0: [5]}, finish="stop")
            await consumer.end()
            assert consumer.tokens() == [5]
            assert len(pool.backend.registry) == 1
            pool.assert_idle()

    asyncio.run(scenario())


def test_roles_and_draining_follow_the_worker_and_the_operator(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            registry = pool.backend.registry
            worker, other = await pool.join("m1", "prefill"), await pool.join("m2", "decode")
            registry.set_role("m1", "decode")
            assert (await worker.expect(SetRole)).role == "decode"
            state = pool.backend.router.pool.get("m1")
            assert state is not None
            assert state.role == "decode"
            registry.drain("m1")
            await worker.expect(DrainWorker)
            for _ in range(3):
                pool.submit()
                await other.expect(Submit)
            assert worker.unread == []
            worker.say(Ready(msgspec.structs.replace(worker.info, role="mixed")))
            await until(lambda: state.role == "mixed" and not state.draining)
            with pytest.raises(InvalidRequest, match="nobody"):
                registry.drain("nobody")

    asyncio.run(scenario())


def test_the_pool_is_described_by_its_longest_window(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            await pool.join("m1", max_model_len=100)
            await pool.join("m2", max_model_len=4000)
            info = pool.backend.worker_info
            assert info is not None
            assert info.max_model_len == 4000

    asyncio.run(scenario())


def test_a_report_that_comes_before_ready_counts(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            worker = await ScriptedWorker.dial(pool.address, scripted_info("m"), SECRET)
            load = Load(1, 0, 0, 0, 1000, 0, 0, 0, 0)
            worker.say(StepFrame(load))
            worker.say(Ready(worker.info))
            await until(lambda: pool.backend.registry.get("m") is not None)
            member = pool.backend.registry.get("m")
            assert member is not None
            assert member.load == load

    asyncio.run(scenario())


def test_a_load_report_is_taken_after_the_rest_of_its_frame(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            worker = await pool.join("m")
            pool.submit(100, max_tokens=4)
            await worker.expect(Submit)
            state = pool.backend.router.pool.get("m")
            assert state is not None
            load = Load(1, 1, 0, 4, 1000, 1, 0, 0, 0, last_charge=1)
            worker.say(StepFrame(load))
            await until(lambda: state.decode.load > 0 and state.last_charge == 1)
            member = pool.backend.registry.get("m")
            assert member is not None
            assert member.load == load

    asyncio.run(scenario())
