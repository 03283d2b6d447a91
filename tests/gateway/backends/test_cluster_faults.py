"""What the gateway does about each part that is lost, as docs/prefill-decode.md says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from support.scripted_worker import FINGERPRINT, ScriptedWorker
from support.worker_pool import PoolWithListener, until, worker_pool
from twinfire.protocol.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    WorkerLost,
)
from twinfire.protocol.messages import (
    ALL_CHOICES,
    Cancel,
    HandOffFailed,
    Rejected,
    Reserve,
    Reserved,
    Submit,
)
from twinfire.protocol.tokens import pack_ids


def close(worker: ScriptedWorker, request_id: int) -> None:
    worker.die()


def freeze(worker: ScriptedWorker, request_id: int) -> None:
    worker.freeze()


def stall(worker: ScriptedWorker, request_id: int) -> None:
    worker.stall()


def refuse(worker: ScriptedWorker, request_id: int) -> None:
    worker.say(Rejected(request_id, "the worker is draining", status=503))


def too_busy(worker: ScriptedWorker, request_id: int) -> None:
    worker.say(Rejected(request_id, "full", status=429))


def garbage(worker: ScriptedWorker, request_id: int) -> None:
    worker.writer.write(b"\xff" * 64)


def hand_off_failed(worker: ScriptedWorker, request_id: int) -> None:
    worker.say(HandOffFailed(request_id, 0, "the peer link closed"))


Fault = Callable[[ScriptedWorker, int], None]
ANY_FAULT = [close, freeze, stall, refuse, too_busy, garbage, hand_off_failed]


async def two_of_each(pool: PoolWithListener) -> tuple[ScriptedWorker, ...]:
    return (
        await pool.join("p1", "prefill"),
        await pool.join("d1", "decode"),
        await pool.join("p2", "prefill"),
        await pool.join("d2", "decode"),
    )


@pytest.mark.parametrize("fault", ANY_FAULT)
def test_losing_prefill_before_the_commit_moves_to_another(tmp_path: Path, fault: Fault) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            workers = {w.info.instance_id: w for w in await two_of_each(pool)}
            consumer = pool.submit(policy="always")
            decode = workers[(await next_reserve(workers)).info.instance_id]
            reserve = await decode.expect(Reserve)
            lost = workers.pop(reserve.prefill_instance)
            first = reserve.submit.request_id
            assert (await lost.expect(Submit)).request_id == first
            decode.say(Reserved(first, reserve.submit.attempt, 0))
            fault(lost, first)
            assert await decode.expect(Cancel) == Cancel(first, ALL_CHOICES)
            other = workers["p1" if "p1" in workers else "p2"]
            again = await other.expect(Submit)
            assert again.request_id != first
            assert again.attempt == 1
            assert again.hand_off is not None
            second = workers[again.hand_off.decode.instance_id]
            assert (await second.expect(Reserve)).prefill_instance == other.info.instance_id
            decode.accept(first, {0: [99]})
            second.accept(again.request_id, {0: [5]})
            second.output(again.request_id, 0, [6], "stop")
            await consumer.end()
            assert (consumer.error, consumer.tokens()) == (None, [5, 6])
            assert consumer.generation.record.num_attempts == 2
            assert consumer.generation.record.prefill == other.info.instance_id
            pool.assert_idle()

    asyncio.run(scenario())


async def next_reserve(workers: dict[str, ScriptedWorker]) -> ScriptedWorker:
    def reserved() -> list[ScriptedWorker]:
        return [w for w in workers.values() if any(isinstance(m, Reserve) for m in w.unread)]

    await until(lambda: bool(reserved()))
    return reserved()[0]


def test_losing_the_only_prefill_worker_leaves_all_to_decode(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            prefill, decode = await pool.join("p", "prefill"), await pool.join("d", "decode")
            consumer = pool.submit(policy="always")
            first = (await prefill.expect(Submit)).request_id
            await decode.expect(Reserve)
            prefill.say(HandOffFailed(first, 0, "no link to the peer"))
            assert (await decode.expect(Cancel)).request_id == first
            again = await decode.expect(Submit)
            assert again.hand_off is None
            decode.accept(again.request_id, {0: [5]}, finish="stop")
            await consumer.end()
            assert consumer.tokens() == [5]
            assert consumer.generation.record.prefill is None
            pool.assert_idle()

    asyncio.run(scenario())


def test_a_pair_that_fails_again_and_again_is_left_alone_for_a_while(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            prefill, decode = await pool.join("p", "prefill"), await pool.join("d", "decode")
            for _ in range(2):
                consumer = pool.submit(policy="always")
                first = (await prefill.expect(Submit)).request_id
                await decode.expect(Reserve)
                prefill.say(HandOffFailed(first, 0, "no link to the peer"))
                await decode.expect(Cancel)
                await prefill.expect(Cancel)
                submit = await decode.expect(Submit)
                decode.accept(submit.request_id, {0: [5]}, finish="stop")
                await consumer.end()
            consumer = pool.submit(policy="always")
            submit = await decode.expect(Submit)
            decode.accept(submit.request_id, {0: [5]}, finish="stop")
            await consumer.end()
            record = consumer.generation.record
            assert (record.num_attempts, record.reason) == (1, "no_prefill_worker")
            assert prefill.unread == []
            pool.assert_idle()

    asyncio.run(scenario())


@pytest.mark.parametrize("fault", ANY_FAULT)
def test_losing_decode_before_it_accepted_cancels_prefill(tmp_path: Path, fault: Fault) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            prefill, decode = await pool.join("p", "prefill"), await pool.join("d", "decode")
            consumer = pool.submit(policy="always")
            first = (await prefill.expect(Submit)).request_id
            await decode.expect(Reserve)
            fault(decode, first)
            assert await prefill.expect(Cancel) == Cancel(first, ALL_CHOICES)
            if fault is hand_off_failed:
                # Whoever computed the prompt is blamed; the other one does all of it.
                await decode.expect(Cancel)
            other = decode if fault is hand_off_failed else prefill
            again = await other.expect(Submit)
            assert again.hand_off is None
            other.accept(again.request_id, {0: [5]}, finish="stop")
            await consumer.end()
            assert (consumer.error, consumer.tokens()) == (None, [5])
            pool.assert_idle()

    asyncio.run(scenario())


@pytest.mark.parametrize("fault", [close, freeze, stall, garbage])
def test_losing_decode_mid_stream_resumes_without_gap_or_repeat(
    tmp_path: Path, fault: Fault
) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            workers = {w.info.instance_id: w for w in await two_of_each(pool)}
            consumer = pool.submit(policy="always", prompt_logprobs=2)
            decode = await next_reserve(workers)
            first = (await decode.expect(Reserve)).submit.request_id
            decode.accept(first, {0: [5]}, cached=32)
            decode.output(first, 0, [6])
            await consumer.has(2)
            del workers[decode.info.instance_id]
            fault(decode, first)
            second = await next_reserve(workers)
            again = (await second.expect(Reserve)).submit
            assert (again.choices, again.outputs) == ((0,), (pack_ids([5, 6]),))
            assert again.sampling.max_tokens == 50
            assert again.sampling.prompt_logprobs == -1
            second.accept(again.request_id, {0: [7]}, cached=96)
            second.output(again.request_id, 0, [8], "length")
            await consumer.end()
            assert (consumer.error, consumer.tokens()) == (None, [5, 6, 7, 8])
            [prompt] = consumer.prompts
            assert prompt.cached_tokens == 32
            record = consumer.generation.record
            assert (record.num_resumes, record.num_attempts) == (1, 2)
            pool.assert_idle()

    asyncio.run(scenario())


def test_each_unfinished_choice_resumes_by_itself(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            lost = await pool.join("m1")
            consumer = pool.submit(n=3)
            first = (await lost.expect(Submit)).request_id
            lost.accept(first, {0: [10], 1: [20], 2: [30]})
            lost.output(first, 1, [21], "stop")
            lost.output(first, 2, [31])
            await consumer.has(2, choice=2)
            other = await pool.join("m2")
            lost.die()
            submits = [await other.expect(Submit), await other.expect(Submit)]
            by_choice = {submit.choices: submit for submit in submits}
            assert by_choice[(0,)].outputs == (pack_ids([10]),)
            assert by_choice[(2,)].outputs == (pack_ids([30, 31]),)
            assert by_choice[(0,)].sampling.n == 3
            for choice, token in ((2, 32), (0, 11)):
                submit = by_choice[(choice,)]
                other.accept(submit.request_id, {choice: [token]}, finish="stop")
            await consumer.end()
            assert consumer.error is None
            assert [consumer.tokens(i) for i in range(3)] == [[10, 11], [20, 21], [30, 31, 32]]
            assert len(consumer.prompts) == 1
            assert consumer.generation.record.num_resumes == 2
            pool.assert_idle()

    asyncio.run(scenario())


def test_a_request_before_its_output_is_tried_again_as_a_whole(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            lost, other = await pool.join("m1"), await pool.join("m2")
            consumer = pool.submit(n=3)
            await until(lambda: bool(lost.unread or other.unread))
            if other.unread:
                lost, other = other, lost
            await lost.expect(Submit)
            lost.die()
            submit = await other.expect(Submit)
            assert (submit.choices, submit.outputs) == ((), ())
            other.accept(submit.request_id, {0: [1], 1: [2], 2: [3]}, finish="stop")
            await consumer.end()
            assert consumer.error is None
            pool.assert_idle()

    asyncio.run(scenario())


def test_what_a_worker_gives_up_by_itself_goes_on_elsewhere(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            worker = await pool.join("m1")
            consumer = pool.submit()
            first = (await worker.expect(Submit)).request_id
            worker.accept(first, {0: [5]})
            await consumer.has(1)
            other = await pool.join("m2")
            worker.output(first, 0, [], "cancelled")
            submit = await other.expect(Submit)
            other.accept(submit.request_id, {0: [6]}, finish="stop")
            await consumer.end()
            assert (consumer.error, consumer.tokens()) == (None, [5, 6])

    asyncio.run(scenario())


def test_a_wrong_request_is_never_tried_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            prefill, decode = await pool.join("p", "prefill"), await pool.join("d", "decode")
            consumer = pool.submit(policy="always")
            submit = await prefill.expect(Submit)
            await decode.expect(Reserve)
            prefill.say(Rejected(submit.request_id, "bad ids", param="prompt", code="c"))
            await consumer.end()
            assert isinstance(consumer.error, InvalidRequest)
            assert (consumer.error.param, consumer.error.code) == ("prompt", "c")
            await decode.expect(Cancel)
            assert (prefill.unread, decode.unread) == ([], [])
            assert consumer.generation.record.num_attempts == 1
            pool.assert_idle()

    asyncio.run(scenario())


def test_three_tries_are_all(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            workers = [await pool.join(f"m{number}") for number in range(4)]
            consumer = pool.submit()
            for _ in range(3):
                await until(lambda: any(worker.unread for worker in workers))
                [worker] = [worker for worker in workers if worker.unread]
                submit = await worker.expect(Submit)
                worker.say(Rejected(submit.request_id, "full", status=429))
            await consumer.end()
            assert isinstance(consumer.error, Overloaded)
            assert consumer.generation.record.num_attempts == 3
            assert not any(worker.unread for worker in workers)
            assert pool.backend.tallies.failures == {"busy": 3}
            pool.assert_idle()

    asyncio.run(scenario())


def test_with_nobody_left_the_fault_itself_is_told(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            worker = await pool.join("m")
            consumer = pool.submit()
            submit = await worker.expect(Submit)
            worker.say(Rejected(submit.request_id, "the worker is draining", status=503))
            await consumer.end()
            assert isinstance(consumer.error, WorkerLost)
            assert "draining" in str(consumer.error)
            pool.assert_idle()

    asyncio.run(scenario())


def test_a_worker_that_comes_back_in_time_gets_the_request(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            worker = await pool.join("m1")
            consumer = pool.submit()
            first = (await worker.expect(Submit)).request_id
            worker.accept(first, {0: [5]})
            await consumer.has(1)
            worker.die()
            await until(lambda: len(pool.backend.registry) == 0)
            other = await pool.join("m1, another life")
            submit = await other.expect(Submit)
            other.accept(submit.request_id, {0: [6]}, finish="stop")
            await consumer.end()
            assert (consumer.error, consumer.tokens()) == (None, [5, 6])

    asyncio.run(scenario())


def test_a_stream_never_goes_on_with_another_model(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            worker = await pool.join("m1")
            consumer = pool.submit()
            first = (await worker.expect(Submit)).request_id
            worker.accept(first, {0: [5]})
            await consumer.has(1)
            worker.die()
            await until(lambda: len(pool.backend.registry) == 0)
            newer = msgspec.structs.replace(FINGERPRINT, kernel_version="kernels 2")
            await pool.join("m2", fingerprint=newer)
            await consumer.end()
            assert isinstance(consumer.error, WorkerLost)
            assert "another version" in str(consumer.error)
            pool.assert_idle()

    asyncio.run(scenario())


def test_the_deadline_ends_both_legs(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            prefill, decode = await pool.join("p", "prefill"), await pool.join("d", "decode")
            consumer = pool.submit(policy="always", deadline_s=0.1)
            await prefill.expect(Submit)
            await decode.expect(Reserve)
            await consumer.end()
            assert isinstance(consumer.error, DeadlineExceeded)
            await prefill.expect(Cancel)
            await decode.expect(Cancel)
            pool.assert_idle()

    asyncio.run(scenario())


def test_the_deadline_ends_a_stream(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            worker = await pool.join("m")
            consumer = pool.submit(deadline_s=0.1)
            request_id = (await worker.expect(Submit)).request_id
            worker.accept(request_id, {0: [5]})
            await consumer.end()
            assert isinstance(consumer.error, DeadlineExceeded)
            await worker.expect(Cancel)
            pool.assert_idle()

    asyncio.run(scenario())


def test_a_worker_whose_time_is_over_first_says_the_same(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            prefill, decode = await pool.join("p", "prefill"), await pool.join("d", "decode")
            consumer = pool.submit(policy="always", deadline_s=5)
            submit = await prefill.expect(Submit)
            await decode.expect(Reserve)
            decode.say(HandOffFailed(submit.request_id, 0, "the time is over", retry=False))
            await consumer.end()
            assert isinstance(consumer.error, DeadlineExceeded)
            await prefill.expect(Cancel)
            pool.assert_idle()

    asyncio.run(scenario())


def test_waiting_in_the_queue_past_the_deadline_says_when_to_come_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            worker = await pool.join("m", num_kv_blocks=4)
            running = pool.submit(100, max_tokens=4)
            first = await worker.expect(Submit)
            waiting = pool.submit(100, max_tokens=4, deadline_s=0.1)
            await waiting.end()
            assert isinstance(waiting.error, Overloaded)
            assert waiting.error.retry_after_s > 0
            refused = pool.submit(100, max_tokens=4, reject_if_busy=True)
            await refused.end()
            assert isinstance(refused.error, Overloaded)
            next_one = pool.submit(100, max_tokens=4)
            worker.accept(first.request_id, {0: [5]}, finish="stop")
            await running.end()
            submit = await worker.expect(Submit)
            worker.accept(submit.request_id, {0: [6]}, finish="stop")
            await next_one.end()
            assert next_one.tokens() == [6]
            pool.assert_idle()

    asyncio.run(scenario())


def test_what_can_never_fit_is_refused_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            worker = await pool.join("m", num_kv_blocks=4)
            consumer = pool.submit(4000)
            await consumer.end()
            assert isinstance(consumer.error, InvalidRequest)
            assert worker.unread == []

    asyncio.run(scenario())
