from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.routing_workers import load_report, worker_info
from twinfire.bench.virtual_time import run_virtual
from twinfire.gateway.routing.admission import AdmissionQueue
from twinfire.gateway.routing.route import NoWorker, Route, RouteRequest
from twinfire.gateway.routing.router import Router
from twinfire.gateway.routing.routing_settings import RoutingSettings
from twinfire.protocol.errors import InvalidRequest, Overloaded

BIG, SMALL = 16_000, 4_000
"""Prompts that take about half and an eighth of the only worker's cache."""


class Gate:
    """One mixed worker with 1,000 blocks, its router and the queue before it."""

    def __init__(self, **settings: object) -> None:
        self.settings = RoutingSettings(**{"max_prefill_queue_s": 1e9, **settings})  # type: ignore[arg-type]
        self.clock: Callable[[], float] = asyncio.get_running_loop().time
        self.router = Router(self.clock, self.settings)
        self.queue = AdmissionQueue(self.router, self.clock)
        self.order: list[str] = []

    def join(self) -> None:
        self.router.worker_joined(worker_info("w", max_model_len=40_000))
        self.router.observe_load("w", load_report(prefill_tokens_per_s=10_000))

    def enter(
        self, name: str, tokens: int, priority: int = 0, timeout_s: float = 1e6, **more: bool
    ) -> asyncio.Task[Route]:
        async def one() -> Route:
            request = RouteRequest(tokens, (), 100, priority=priority)
            route = await self.queue.enter(request, self.clock() + timeout_s, **more)
            self.order.append(name)
            return route

        return asyncio.ensure_future(one())

    def is_empty(self) -> bool:
        loads = [(one.prefill.load, one.decode.load) for one in self.router.workers()]
        return not len(self.queue) and not self.queue.num_tokens and loads == [(0, 0)]


async def full_gate(**settings: object) -> tuple[Gate, list[Route]]:
    gate = Gate(**settings)
    gate.join()
    tasks = [gate.enter(f"first {number}", 15_000) for number in range(2)]
    routes = [await task for task in tasks]
    gate.order.clear()
    return gate, routes


def test_a_request_that_fits_does_not_wait() -> None:
    async def main() -> None:
        gate = Gate()
        gate.join()
        (await gate.enter("a", SMALL)).charge.release()
        assert gate.clock() == 0.0
        assert gate.is_empty()

    run_virtual(main())


def test_waiting_ends_the_moment_room_is_made_in_order_of_arrival() -> None:
    async def main() -> None:
        gate, held = await full_gate()
        tasks = [gate.enter(name, SMALL) for name in "abc"]
        await asyncio.sleep(5)
        assert gate.order == []
        assert gate.queue.num_tokens == 3 * SMALL
        held[0].charge.release()
        for task in tasks:
            (await task).charge.release()
        assert gate.order == ["a", "b", "c"]
        assert gate.clock() == pytest.approx(5.0)
        held[1].charge.release()
        assert gate.is_empty()

    run_virtual(main())


def test_priority_goes_first_and_waiting_makes_up_for_it() -> None:
    async def main() -> None:
        gate, held = await full_gate(ageing_s=10.0)
        tasks = [gate.enter("old", BIG, priority=1)]
        await asyncio.sleep(1)
        tasks += [gate.enter("low", BIG, priority=1), gate.enter("high", BIG, priority=0)]
        await asyncio.sleep(11)
        # By now the first has waited for more than one step of priority.
        tasks += [gate.enter("late", BIG, priority=0)]
        await asyncio.sleep(1)
        for route in held:
            route.charge.release()
        for task in [tasks[2], tasks[0], tasks[1], tasks[3]]:
            (await task).charge.release()
        assert gate.order == ["high", "old", "low", "late"]

    run_virtual(main())


def test_small_ones_pass_a_huge_one_only_for_a_while() -> None:
    async def main() -> None:
        gate, held = await full_gate(max_passed_s=2.0)
        held[0].charge.release()
        huge = gate.enter("huge", 29_000)
        early = gate.enter("early", SMALL)
        (await early).charge.release()
        await asyncio.sleep(3)
        late = gate.enter("late", SMALL)
        await asyncio.sleep(10)
        assert gate.order == ["early"]
        held[1].charge.release()
        (await huge).charge.release()
        (await late).charge.release()
        assert gate.order == ["early", "huge", "late"]
        assert gate.is_empty()

    run_virtual(main())


def test_a_deadline_is_kept_and_says_when_to_come_back() -> None:
    async def main() -> None:
        gate, held = await full_gate()
        await asyncio.sleep(4)
        with pytest.raises(Overloaded, match=r"2\.0 s") as caught:
            await gate.enter("a", SMALL, timeout_s=2.0)
        assert gate.clock() == pytest.approx(6.0)
        # 30,000 prompt tokens are ahead of it at 10,000 a second.
        assert caught.value.retry_after_s == pytest.approx(3.4)
        for route in held:
            route.charge.release()
        assert gate.is_empty()

    run_virtual(main())


def test_the_queue_is_bounded_by_requests_and_by_tokens() -> None:
    async def main() -> None:
        gate, _ = await full_gate(max_queued_requests=3, max_queued_tokens=20_000)
        gate.enter("a", SMALL)
        gate.enter("b", SMALL)
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await gate.enter("too many tokens", BIG)
        gate.enter("c", SMALL)
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await gate.enter("too many requests", 10)
        assert len(gate.queue) == 3

    run_virtual(main())


def test_reject_if_busy_never_waits_and_never_passes() -> None:
    async def main() -> None:
        gate, held = await full_gate()
        with pytest.raises(Overloaded):
            await gate.enter("a", SMALL, reject_if_busy=True)
        gate.enter("waits", BIG)
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await gate.enter("b", 100, reject_if_busy=True)
        for route in held:
            route.charge.release()
        await asyncio.sleep(0.1)
        assert await gate.enter("c", 100, reject_if_busy=True)

    run_virtual(main())


def test_what_can_never_fit_is_refused_at_once_though_others_wait() -> None:
    async def main() -> None:
        gate, _ = await full_gate()
        gate.enter("a", SMALL)
        await asyncio.sleep(0)
        with pytest.raises(InvalidRequest):
            await gate.enter("b", 39_950)
        assert gate.clock() == 0.0

    run_virtual(main())


def test_a_caller_that_leaves_owes_nothing_even_with_its_route_on_the_way() -> None:
    async def main() -> None:
        gate, held = await full_gate()
        tasks = [gate.enter(name, BIG) for name in "ab"]
        await asyncio.sleep(1)
        tasks[0].cancel()
        await asyncio.sleep(0)
        assert len(gate.queue) == 1
        for route in held:
            route.charge.release()
        # The queue places `b` in the next pass of the loop; it is cancelled before it wakes up.
        await asyncio.sleep(0)
        assert len(gate.queue) == 0
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert gate.order == []
        assert gate.is_empty()

    run_virtual(main())


def test_a_model_without_workers_is_waited_for_a_little() -> None:
    async def main() -> None:
        gate = Gate(no_worker_wait_s=5.0)
        waiting = gate.enter("a", SMALL)
        await asyncio.sleep(3)
        gate.join()
        (await waiting).charge.release()
        gate.router.worker_left("w")
        with pytest.raises(NoWorker):
            await gate.enter("b", SMALL)
        assert gate.clock() == pytest.approx(8.0)
        assert not len(gate.queue)
        with pytest.raises(NoWorker):
            await gate.enter("c", SMALL, reject_if_busy=True)

    run_virtual(main())


def test_when_everyone_is_excluded_nothing_is_waited_for() -> None:
    async def main() -> None:
        gate = Gate()
        gate.join()
        request = RouteRequest(100, (), 100, exclude=frozenset({"w"}))
        with pytest.raises(NoWorker):
            await gate.queue.enter(request, None)
        assert gate.clock() == 0.0

    run_virtual(main())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 30_000), st.integers(-2, 2), st.floats(0, 5), st.floats(0.1, 20)),
        min_size=1,
        max_size=25,
    ),
    st.sets(st.integers(0, 24)),
)
def test_everyone_is_served_or_told_and_nothing_is_left(
    arrivals: list[tuple[int, int, float, float]], cancelled: set[int]
) -> None:
    async def main() -> None:
        gate = Gate(max_prefill_queue_s=1.0)
        gate.join()
        served = []

        async def one(number: int, tokens: int, priority: int, service_s: float) -> None:
            request = RouteRequest(tokens, (), 100, priority=priority)
            route = await gate.queue.enter(request, gate.clock() + 2_000)
            served.append(number)
            try:
                await asyncio.sleep(service_s / 2)
                route.charge.decode_started()
                await asyncio.sleep(service_s / 2)
            finally:
                route.charge.release()

        tasks = []
        for number, (tokens, priority, gap_s, service_s) in enumerate(arrivals):
            tasks.append(asyncio.ensure_future(one(number, tokens, priority, service_s)))
            await asyncio.sleep(gap_s)
            if number in cancelled:
                tasks[number].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert set(range(len(arrivals))) - set(served) <= cancelled
        assert gate.is_empty()

    run_virtual(main())
