"""Requests over one worker or two, when nothing goes wrong."""

from __future__ import annotations

import asyncio
from array import array
from pathlib import Path

from support.scripted_worker import hand_off_times
from support.worker_pool import SECRET, Consumer, until, worker_pool
from twinfire.cache.block_hash import HashChain
from twinfire.gateway.backends.request_context import RequestContext
from twinfire.protocol.messages import (
    ALL_CHOICES,
    CacheEvents,
    Cancel,
    Preempted,
    PrefillProgress,
    Reserve,
    Reserved,
    ResyncCache,
    Submit,
)
from twinfire.protocol.sampling import SamplingParams
from twinfire.protocol.secret import hash_seed
from twinfire.protocol.tokens import pack_ids, unpack_ids


def test_one_worker_does_all_of_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            worker = await pool.join("m")
            consumer = pool.submit(100, n=2)
            submit = await worker.expect(Submit)
            assert unpack_ids(submit.prompt) == array("I", range(1, 101))
            assert (submit.choices, submit.outputs, submit.hand_off) == ((), (), None)
            worker.accept(submit.request_id, {0: [5], 1: [6]}, cached=64)
            worker.output(submit.request_id, 0, [7, 8], "stop")
            worker.output(submit.request_id, 1, [9], "length")
            await consumer.end()
            assert consumer.error is None
            assert (consumer.tokens(0), consumer.tokens(1)) == ([5, 7, 8], [6, 9])
            assert (consumer.finish(0), consumer.finish(1)) == ("stop", "length")
            [prompt] = consumer.prompts
            assert prompt.cached_tokens == 64
            record = consumer.generation.record
            assert (record.decode, record.prefill, record.num_attempts) == ("m", None, 1)
            assert worker.unread == []
            pool.assert_idle()

    asyncio.run(scenario())


def test_a_prompt_is_handed_from_prefill_to_decode(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            prefill, decode = await pool.join("p", "prefill"), await pool.join("d", "decode")
            consumer = pool.submit(100, policy="always", deadline_s=60)
            reserve = await decode.expect(Reserve)
            submit = await prefill.expect(Submit)
            assert reserve.prefill_instance == "p"
            assert submit.hand_off is not None
            assert submit.hand_off.decode.instance_id == "d"
            assert reserve.submit.hand_off is None
            assert reserve.submit.request_id == submit.request_id
            assert reserve.submit.attempt == submit.attempt
            assert submit.timeout_s is not None
            assert 59 < submit.timeout_s <= 60
            decode.say(Reserved(submit.request_id, submit.attempt, 0))
            router = pool.backend.router.pool
            assert router.get("p").prefill.charged == 100  # type: ignore[union-attr]
            prefill.say_step(progress=[PrefillProgress(submit.request_id, 64)])
            await until(lambda: router.get("p").prefill.charged == 36)  # type: ignore[union-attr]
            times = hand_off_times("p")
            decode.accept(submit.request_id, {0: [5]}, hand_off=times, queue_s=0.004)
            await consumer.has(1)
            assert router.get("p").prefill.charged == 0  # type: ignore[union-attr]
            assert router.get("d").decode.charged > 0  # type: ignore[union-attr]
            decode.output(submit.request_id, 0, [6], "stop")
            await consumer.end()
            assert consumer.tokens() == [5, 6]
            record = consumer.generation.record
            assert (record.decode, record.prefill, record.reason) == ("d", "p", "always")
            assert record.hand_off == times
            parts = record.first_token
            assert parts is not None
            assert parts.prefill_queue_s == 0.004 - 0.001
            assert parts.decode_queue_s == 0.001 + 0.0005
            assert parts.transfer_s == 0.002
            assert prefill.unread == []
            assert decode.unread == []
            tallies = pool.backend.tallies
            assert (tallies.num_hand_offs, tallies.moved_bytes) == (1, times.num_bytes)
            pool.assert_idle()

    asyncio.run(scenario())


def test_a_short_prompt_does_not_wait_behind_a_long_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            prefill, decode = await pool.join("p", "prefill"), await pool.join("d", "decode")
            long = pool.submit(3_000, policy="always")
            first = (await prefill.expect(Submit)).request_id
            next_long = pool.submit(list(range(3_000, 0, -1)), policy="always")
            await until(lambda: len(pool.backend.admission) == 1)
            short = pool.submit(128, policy="always")
            passing = (await prefill.expect(Submit)).request_id
            reserved = [(await decode.expect(Reserve)).submit.request_id for _ in range(2)]
            assert reserved == [first, passing]
            decode.accept(passing, {0: [7]}, finish="stop")
            await short.end()
            assert (short.tokens(), long.tokens(), next_long.tokens()) == ([7], [], [])
            decode.accept(first, {0: [8]}, finish="stop")
            await long.end()
            last = (await prefill.expect(Submit)).request_id
            assert (await decode.expect(Reserve)).submit.request_id == last
            decode.accept(last, {0: [9]}, finish="stop")
            await next_long.end()
            assert (long.tokens(), next_long.tokens()) == ([8], [9])
            pool.assert_idle()

    asyncio.run(scenario())


def test_a_first_token_may_end_the_request(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            await pool.join("p", "prefill")
            decode = await pool.join("d", "decode")
            consumer = pool.submit(policy="always")
            reserve = await decode.expect(Reserve)
            decode.accept(reserve.submit.request_id, {0: [5]}, finish="stop")
            await consumer.end()
            assert (consumer.tokens(), consumer.finish()) == ([5], "stop")
            pool.assert_idle()

    asyncio.run(scenario())


def test_tokens_are_offered_as_they_come_and_may_cancel_their_choice(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            worker = await pool.join("m")
            generation = pool.backend.submit(
                array("I", [1, 2]), SamplingParams(max_tokens=9, seed=1, n=2)
            )
            taken: list[object] = []

            def take(event: object) -> bool:
                taken.append(event)
                if len(taken) == 3:
                    generation.cancel(1)
                return True

            generation.offer_to(take)
            consumer = Consumer(generation)
            submit = await worker.expect(Submit)
            worker.accept(submit.request_id, {0: [5], 1: [6]})
            assert (await worker.expect(Cancel)).choice == 1
            worker.output(submit.request_id, 1, [7])
            worker.output(submit.request_id, 0, [8], "stop")
            await consumer.end()
            assert consumer.error is None
            assert len(taken) == 4
            pool.assert_idle()

    asyncio.run(scenario())


def test_a_workers_cache_is_known_and_another_is_told_to_pull_from_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            first = await pool.join("first", "prefill")
            second = await pool.join("second", "decode")
            prompt = array("I", range(1, 2001))
            hashes: list[bytes] = []
            HashChain(32, hash_seed(SECRET)).extend(hashes, prompt)
            second.say(CacheEvents(0, b"".join(hashes)))
            await until(lambda: pool.backend.router.index.num_blocks == len(hashes))
            context = RequestContext(pd_policy="always")
            generation = pool.backend.submit(
                prompt, SamplingParams(max_tokens=4, seed=1), context=context
            )
            submit = await first.expect(Submit)
            assert submit.pull is not None
            assert submit.pull.holder.instance_id == "second"
            assert submit.pull.num_blocks == (len(prompt) - 1) // 32
            generation.cancel()
            await first.expect(Cancel)
            pool.assert_idle()

    asyncio.run(scenario())


def test_a_gap_in_cache_events_is_asked_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            worker = await pool.join("m")
            worker.say(CacheEvents(7, b"x" * 32))
            await worker.expect(ResyncCache)

    asyncio.run(scenario())


def test_a_long_preempted_choice_is_handed_over_anew(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            prefill = await pool.join("p", "prefill")
            decode = await pool.join("d", "decode")
            consumer = pool.submit(2000, n=2, policy="always", prompt_logprobs=1)
            request_id = (await decode.expect(Reserve)).submit.request_id
            await prefill.expect(Submit)
            decode.accept(request_id, {0: [5], 1: [6]})
            await consumer.has(1, choice=1)
            decode.say_step(preempted=[Preempted(request_id, 0, 100)])
            decode.say_step(preempted=[Preempted(request_id, 1, 2001)])
            cancel = await decode.expect(Cancel)
            assert (cancel.request_id, cancel.choice) == (request_id, 1)
            reserve = await decode.expect(Reserve)
            again = reserve.submit
            assert again.choices == (1,)
            assert again.outputs == (pack_ids([6]),)
            assert again.sampling.prompt_logprobs == -1
            assert (await prefill.expect(Submit)).outputs == (pack_ids([6]),)
            # A frame that was under way when the choice was cancelled.
            decode.output(request_id, 1, [99])
            decode.output(request_id, 0, [7], "stop")
            decode.accept(again.request_id, {1: [8]}, cached=1000)
            decode.output(again.request_id, 1, [9], "stop")
            await consumer.end()
            assert (consumer.tokens(0), consumer.tokens(1)) == ([5, 7], [6, 8, 9])
            assert len(consumer.prompts) == 1
            assert consumer.generation.record.num_hand_overs == 1
            pool.assert_idle()

    asyncio.run(scenario())


def test_a_preempted_choice_stays_where_nobody_else_can_compute_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            worker = await pool.join("m")
            consumer = pool.submit(2000)
            request_id = (await worker.expect(Submit)).request_id
            worker.accept(request_id, {0: [5]})
            worker.say_step(preempted=[Preempted(request_id, 0, 2001)])
            worker.output(request_id, 0, [6], "stop")
            await consumer.end()
            assert consumer.tokens() == [5, 6]
            assert worker.unread == []
            pool.assert_idle()

    asyncio.run(scenario())


def test_cancelling_everything_is_one_message(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            worker = await pool.join("m")
            consumer = pool.submit(10, n=3)
            request_id = (await worker.expect(Submit)).request_id
            worker.accept(request_id, {0: [5], 1: [6], 2: [7]})
            await consumer.has(1, choice=2)
            consumer.generation.cancel()
            consumer.generation.cancel()
            assert await worker.expect(Cancel) == Cancel(request_id, ALL_CHOICES)
            await consumer.end()
            assert consumer.error is None
            assert worker.unread == []
            pool.assert_idle()

    asyncio.run(scenario())
