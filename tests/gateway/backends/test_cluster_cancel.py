"""A client may leave at any moment: both legs and the charge are free at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from support.scripted_worker import ScriptedWorker
from support.worker_pool import Consumer, PoolWithListener, worker_pool
from twinfire.protocol.messages import ALL_CHOICES, Cancel, PrefillProgress, Reserve, Reserved


class Scene:
    """A request between a prefill and a decode worker."""

    def __init__(self, pool: PoolWithListener, p: ScriptedWorker, d: ScriptedWorker) -> None:
        self.pool = pool
        self.prefill = p
        self.decode = d
        self.consumer: Consumer = pool.submit(1000, n=2, policy="always", deadline_s=60)
        self.request_id = 0

    async def sent(self) -> None:
        self.request_id = (await self.decode.expect(Reserve)).submit.request_id
        await self.prefill.next()

    async def reserved(self) -> None:
        await self.sent()
        self.decode.say(Reserved(self.request_id, 0, 0))

    async def prefilling(self) -> None:
        await self.reserved()
        self.prefill.say_step(progress=[PrefillProgress(self.request_id, 512)])
        # The report has arrived once what was sent after it has.
        self.prefill.say_step()
        await asyncio.sleep(0.02)

    async def committed(self) -> None:
        await self.prefilling()
        self.decode.accept(self.request_id, {0: [5], 1: [6]})
        await self.consumer.has(1, choice=1)

    async def decoding(self) -> None:
        await self.committed()
        self.decode.output(self.request_id, 0, [7])
        await self.consumer.has(2)

    async def one_choice_ended(self) -> None:
        await self.decoding()
        self.decode.output(self.request_id, 1, [8], "stop")
        await self.consumer.has(2, choice=1)


State = Callable[[Scene], Awaitable[None]]
BEFORE_COMMIT = [Scene.sent, Scene.reserved, Scene.prefilling]
AFTER_COMMIT = [Scene.committed, Scene.decoding, Scene.one_choice_ended]


@pytest.mark.parametrize("state", BEFORE_COMMIT + AFTER_COMMIT)
def test_cancelling_frees_whatever_is_held(tmp_path: Path, state: State) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            scene = Scene(pool, await pool.join("p", "prefill"), await pool.join("d", "decode"))
            await state(scene)
            scene.consumer.generation.cancel()
            scene.consumer.generation.cancel()
            pool.assert_idle()
            cancel = Cancel(scene.request_id, ALL_CHOICES)
            assert await scene.decode.expect(Cancel) == cancel
            if state in BEFORE_COMMIT:
                assert await scene.prefill.expect(Cancel) == cancel
            scene.decode.accept(scene.request_id, {0: [9], 1: [9]})
            await scene.consumer.end()
            assert scene.consumer.error is None
            assert 9 not in scene.consumer.tokens()
            assert (scene.prefill.unread, scene.decode.unread) == ([], [])

    asyncio.run(scenario())


@pytest.mark.parametrize("state", BEFORE_COMMIT + AFTER_COMMIT[:2])
def test_cancelling_a_choice_leaves_the_other(tmp_path: Path, state: State) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            scene = Scene(pool, await pool.join("p", "prefill"), await pool.join("d", "decode"))
            await state(scene)
            scene.consumer.generation.cancel(1)
            assert await scene.decode.expect(Cancel) == Cancel(scene.request_id, 1)
            if state in BEFORE_COMMIT:
                assert await scene.prefill.expect(Cancel) == Cancel(scene.request_id, 1)
                scene.decode.accept(scene.request_id, {0: [5]})
            scene.decode.output(scene.request_id, 0, [20], "stop")
            await scene.consumer.end()
            assert scene.consumer.error is None
            assert scene.consumer.tokens()[-1] == 20
            pool.assert_idle()

    asyncio.run(scenario())


def test_cancelling_in_the_queue_sends_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            worker = await pool.join("m", num_kv_blocks=4)
            first = pool.submit(100, max_tokens=4)
            await worker.next()
            waiting = pool.submit(100, max_tokens=4)
            await asyncio.sleep(0.02)
            assert len(pool.backend.admission) == 1
            waiting.generation.cancel()
            await waiting.end()
            assert waiting.error is None
            await asyncio.sleep(0)
            assert len(pool.backend.admission) == 0
            first.generation.cancel()
            await worker.expect(Cancel)
            await asyncio.sleep(0.02)
            assert worker.unread == []
            pool.assert_idle()

    asyncio.run(scenario())


def test_cancelling_at_once_sends_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            worker = await pool.join("m")
            consumer = pool.submit(5000)
            consumer.generation.cancel()
            await consumer.end()
            await asyncio.sleep(0.02)
            assert worker.unread == []
            pool.assert_idle()

    asyncio.run(scenario())


def test_cancelling_between_two_tries_ends_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            worker = await pool.join("m")
            consumer = pool.submit()
            await worker.next()
            worker.die()
            while len(pool.backend.registry):
                await asyncio.sleep(0.002)
            await asyncio.sleep(0.02)
            assert len(pool.backend.admission) == 1
            consumer.generation.cancel()
            await consumer.end()
            assert consumer.error is None
            other = await pool.join("m2")
            await asyncio.sleep(0.02)
            assert other.unread == []
            pool.assert_idle()

    asyncio.run(scenario())
