"""Short and long prompts wait apart: in a worker's ledger, in the router and in the queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from support.routing_workers import BLOCK_TOKENS, ManualClock, chain, load_report, worker_info
from twinfire.bench.virtual_time import run_virtual
from twinfire.gateway.routing.admission import AdmissionQueue
from twinfire.gateway.routing.route import AllBusy, Route, RouteRequest
from twinfire.gateway.routing.router import Router
from twinfire.gateway.routing.routing_settings import RoutingSettings
from twinfire.gateway.routing.worker_state import WorkerState
from twinfire.protocol.errors import Overloaded
from twinfire.protocol.messages import CacheEvents

RATE = 1_000
"""Prompt tokens that a worker computes in a second; its steps have 1,024."""
LONG, SHORT = 3_000, 1_000
ROOM, HUGE = 32_000, 26_000
"""Tokens of a cache, and of a prompt that finds no room in it beside two long ones."""


def state(router: Router, name: str = "w") -> WorkerState:
    found = router.pool.get(name)
    assert found is not None
    return found


def one_worker(**settings: object) -> Router:
    router = Router(ManualClock(), RoutingSettings(**settings))  # type: ignore[arg-type]
    router.worker_joined(worker_info("w"))
    router.observe_load("w", load_report(prefill_tokens_per_s=RATE))
    return router


def ask(router: Router, tokens: int, blocks: Sequence[bytes] = (), **more: object) -> Route:
    return router.route(RouteRequest(tokens, blocks, 10, **more))  # type: ignore[arg-type]


class TestRouter:
    def test_each_lane_of_a_worker_has_a_bound_of_its_own(self) -> None:
        router = one_worker()
        routes = [ask(router, LONG)]
        with pytest.raises(AllBusy) as caught:
            ask(router, LONG)
        assert caught.value.lane == "long"
        routes += [ask(router, SHORT) for _ in range(3)]
        with pytest.raises(AllBusy) as caught:
            ask(router, SHORT)
        assert caught.value.lane == "short"
        worker = state(router)
        assert (worker.queued_tokens("short"), worker.queued_tokens("long")) == (3_000, 3_000)
        routes[0].charge.decode_started()
        assert ask(router, LONG)
        with pytest.raises(AllBusy):
            ask(router, SHORT)
        for route in routes:
            route.charge.release()
        assert (worker.queued_tokens("short"), worker.queued_tokens("long")) == (0, LONG)

    def test_a_full_cache_is_told_from_a_full_lane(self) -> None:
        router = one_worker(max_prefill_queue_s=1e9)
        for _ in range(3):
            ask(router, 10_000)
        with pytest.raises(AllBusy) as caught:
            ask(router, SHORT)
        assert caught.value.lane is None

    def test_a_long_prompt_that_is_almost_all_cached_is_short(self) -> None:
        router = one_worker()
        hashes = chain(*range(90))
        assert router.observe_cache("w", CacheEvents(0, stored=b"".join(hashes)))
        ask(router, LONG)
        assert ask(router, LONG, hashes).uncached_on_prefill == LONG - 90 * BLOCK_TOKENS
        assert state(router).queued_tokens("short") == LONG - 90 * BLOCK_TOKENS
        assert router.lane(RouteRequest(LONG, hashes, 10)) == "short"
        assert router.lane(RouteRequest(LONG, (), 10)) == "long"

    def test_each_lane_that_was_refused_is_told_of_when_it_is_free(self) -> None:
        router = one_worker()
        rooms: list[None] = []
        routes = [ask(router, LONG), *(ask(router, SHORT) for _ in range(3))]
        router.when_room(lambda: rooms.append(None))
        for tokens in (LONG, SHORT):
            with pytest.raises(AllBusy):
                ask(router, tokens)
        routes[0].charge.prefill_progress(500)
        assert len(rooms) == 0
        routes[0].charge.prefill_progress(1_000)
        assert len(rooms) == 1
        routes[0].charge.prefill_progress(1_500)
        assert len(rooms) == 1
        routes[1].charge.prefill_done()
        assert len(rooms) == 2

    def test_what_others_put_there_counts_as_long(self) -> None:
        router = one_worker()
        router.observe_load(
            "w", load_report(prefill_tokens_waiting=2_500, prefill_tokens_per_s=RATE)
        )
        with pytest.raises(AllBusy):
            ask(router, LONG)
        ask(router, SHORT)

    @pytest.mark.parametrize(("told", "most"), [(1_024, 1_024), (100, 100), (0, 1_024)])
    def test_short_is_what_one_step_computes(self, told: int, most: int) -> None:
        info = msgspec.structs.replace(worker_info("w"), max_num_batched_tokens=told)
        worker = WorkerState(info, 0.02)
        assert [worker.lane(tokens) for tokens in (most, most + 1)] == ["short", "long"]

    def test_a_prompt_is_short_for_a_worker_that_pulls_most_of_it(self) -> None:
        clock = ManualClock()
        router = Router(clock, RoutingSettings(pd_policy="always"))
        router.worker_joined(worker_info("p", "prefill"))
        router.worker_joined(worker_info("d", "decode"))
        hashes = chain(*range(90))
        assert router.observe_cache("d", CacheEvents(0, stored=b"".join(hashes)))
        ask(router, LONG)
        assert ask(router, LONG, hashes).pull is not None
        assert state(router, "p").queued_tokens("short") == LONG - 90 * BLOCK_TOKENS
        for _ in range(100):
            router.observe_transfer(1_000_000, 1.0)
        # Nor is it promised any more.
        clock.now_s += 10
        with pytest.raises(AllBusy) as caught:
            ask(router, LONG, hashes)
        assert caught.value.lane == "long"

    def test_without_workers_there_is_no_lane(self) -> None:
        assert Router(ManualClock()).lane(RouteRequest(10, (), 10)) is None

    @given(
        st.lists(
            st.tuples(
                st.sampled_from(["route", "progress", "done", "release", "report"]),
                st.integers(0, 5_000),
            ),
            max_size=40,
        )
    )
    def test_lanes_add_up_to_the_load(self, steps: list[tuple[str, int]]) -> None:
        router = one_worker(max_prefill_queue_s=1e9, max_kv_fill=1.0)
        router.worker_joined(worker_info("w", num_kv_blocks=1 << 20))
        worker, routes = state(router), [ask(router, LONG)]
        for number, (what, amount) in enumerate(steps):
            charge = routes[number % len(routes)].charge
            if what == "route":
                routes.append(ask(router, amount + 1, request_id=number))
            elif what == "report":
                router.observe_load(
                    "w", load_report(prefill_tokens_waiting=amount, last_charge=number)
                )
            elif what == "progress":
                charge.prefill_progress(amount)
            elif what == "done":
                charge.prefill_done()
            else:
                charge.release()
            lanes = [worker.queued_tokens("short"), worker.queued_tokens("long")]
            assert min(lanes) >= 0
            assert sum(lanes) == worker.prefill.load
        for route in routes:
            route.charge.release()
        router.observe_load("w", load_report())
        assert worker.queued_tokens("short") == worker.queued_tokens("long") == 0


class Site:
    """One worker of 1,000 blocks behind a queue; it computes what it is told to."""

    def __init__(self, **settings: object) -> None:
        self.clock: Callable[[], float] = asyncio.get_running_loop().time
        self.router = Router(self.clock, RoutingSettings(**settings))  # type: ignore[arg-type]
        self.queue = AdmissionQueue(self.router, self.clock)
        self.order: list[str] = []
        self.router.worker_joined(worker_info("w", max_model_len=ROOM))
        self.router.observe_load("w", load_report(prefill_tokens_per_s=RATE))

    def enter(
        self, name: str, tokens: int, blocks: Sequence[bytes] = (), priority: int = 0, **more: bool
    ) -> asyncio.Task[Route]:
        async def one() -> Route:
            request = RouteRequest(tokens, blocks, 10, priority=priority)
            route = await self.queue.enter(request, self.clock() + 1e6, **more)
            self.order.append(name)
            return route

        return asyncio.ensure_future(one())

    async def hold(self, *names: str, tokens: int = LONG) -> list[Route]:
        """Return the routes of prompts that are taken at once."""
        routes = [await self.enter(name, tokens) for name in names]
        self.order.clear()
        return routes


def test_a_short_prompt_passes_long_ones_that_wait_for_a_prompt_queue() -> None:
    async def main() -> None:
        site = Site()
        [computing] = await site.hold("computing")
        longs = [site.enter(f"long {number}", LONG) for number in range(8)]
        # The head of the queue has waited for longer than anybody may be passed within a lane.
        await asyncio.sleep(5)
        short = site.enter("short", SHORT)
        await asyncio.sleep(0.1)
        assert site.order == ["short"]
        computing.charge.decode_started()
        (await longs[0]).charge.release()
        assert site.order == ["short", "long 0"]
        (await short).charge.release()
        for task in longs[1:]:
            (await task).charge.release()
        assert site.order == ["short", *(f"long {number}" for number in range(8))]

    run_virtual(main())


def test_a_short_prompt_is_woken_by_what_short_ones_have_computed() -> None:
    async def main() -> None:
        site = Site()
        await site.hold("computing")
        running = await site.hold("a", "b", "c", tokens=SHORT)
        site.enter("long", LONG)
        short = site.enter("short", SHORT)
        await asyncio.sleep(5)
        assert site.order == []
        running[0].charge.prefill_progress(SHORT)
        await short
        assert site.clock() == pytest.approx(5.0)
        assert site.order == ["short"]

    run_virtual(main())


def test_a_report_wakes_whom_the_work_of_others_kept_out() -> None:
    async def main() -> None:
        site = Site()
        busy = load_report(prefill_tokens_waiting=5_000, prefill_tokens_per_s=RATE)
        site.router.observe_load("w", busy)
        long = site.enter("long", LONG)
        await asyncio.sleep(3)
        assert site.order == []
        site.router.observe_load("w", load_report(prefill_tokens_per_s=RATE))
        await long
        assert site.clock() == pytest.approx(3.0)

    run_virtual(main())


def test_long_prompts_are_not_starved_by_a_stream_of_short_ones() -> None:
    async def main() -> None:
        site = Site()
        [computing] = await site.hold("computing")
        long = site.enter("long", LONG)
        shorts: list[asyncio.Task[Route]] = []
        for second in range(20):
            shorts += [site.enter(f"short {second}", SHORT) for _ in range(2)]
            await asyncio.sleep(1)
            for task in shorts:
                if task.done() and not task.result().charge.is_released:
                    task.result().charge.release()
                    break
            if second == 10:
                computing.charge.decode_started()
        await asyncio.sleep(0)
        assert long.done()
        before = site.order[: site.order.index("long")]
        assert 10 <= len(before) <= 14
        assert len(site.queue) > 10
        for task in shorts:
            (await task).charge.release()

    run_virtual(main())


def test_a_head_that_waits_for_blocks_gets_its_room_from_both_lanes() -> None:
    async def main() -> None:
        site = Site(max_prefill_queue_s=1e9, max_passed_s=2.0)
        held = await site.hold("a", "b")
        head = site.enter("head", HUGE)
        await asyncio.sleep(1)
        early = [site.enter("short", SHORT), site.enter("long", LONG)]
        for task in early:
            (await task).charge.release()
        await asyncio.sleep(2)
        late = [site.enter("short", SHORT), site.enter("long", LONG)]
        await asyncio.sleep(10)
        assert site.order == ["short", "long"]
        for route in held:
            route.charge.release()
        (await head).charge.release()
        for task in late:
            (await task).charge.release()
        assert site.order == ["short", "long", "head", "short", "long"]

    run_virtual(main())


def test_within_a_lane_small_ones_pass_only_for_a_while() -> None:
    async def main() -> None:
        site = Site(max_passed_s=2.0)
        site.router.worker_joined(worker_info("v", max_model_len=ROOM))
        site.router.observe_load("v", load_report(prefill_tokens_per_s=RATE))
        held = await site.hold("on w", "on v", tokens=5_000)
        hashes = chain(*range(90))
        site.router.observe_cache("w", CacheEvents(0, stored=b"".join(hashes)))
        for _ in range(3):
            only_w = RouteRequest(SHORT, (), 10, exclude=frozenset({"v"}))
            held.append(site.router.route(only_w))
        for _ in range(100):
            site.router.observe_transfer(1_000_000, 1.0)
        # Short for the worker that has no room for it, too long for the other.
        head = site.enter("head", LONG, hashes)
        await asyncio.sleep(1)
        early = site.enter("early", 100)
        await asyncio.sleep(2)
        late = site.enter("late", 100)
        await asyncio.sleep(1)
        assert site.order == ["early"]
        held[2].charge.release()
        (await head).charge.release()
        (await late).charge.release()
        (await early).charge.release()
        assert site.order == ["early", "head", "late"]

    run_virtual(main())


def test_priority_goes_first_within_each_lane() -> None:
    async def main() -> None:
        site = Site()
        held = await site.hold("computing") + await site.hold("a", "b", "c", tokens=SHORT)
        tasks = [
            site.enter(f"{size} {priority}", tokens, priority=priority)
            for priority in (2, 0, 1)
            for size, tokens in (("long", LONG), ("short", SHORT))
        ]
        await asyncio.sleep(0.1)
        for route in held:
            route.charge.release()
        for _ in range(3):
            await asyncio.sleep(0.1)
            for task in tasks:
                if task.done():
                    task.result().charge.release()
        for size in ("short", "long"):
            ranks = [name.split()[1] for name in site.order if name.startswith(size)]
            assert ranks == ["0", "1", "2"]

    run_virtual(main())


def test_a_prompt_whose_prefix_was_forgotten_does_not_hold_up_short_ones() -> None:
    async def main() -> None:
        site = Site()
        hashes = chain(*range(90))
        site.router.observe_cache("w", CacheEvents(0, stored=b"".join(hashes)))
        held = await site.hold("computing")
        held += await site.hold("a", "b", "c", tokens=SHORT)
        cached = site.enter("cached", LONG, hashes)
        await asyncio.sleep(0.1)
        site.router.observe_cache("w", CacheEvents(1, removed=b"".join(hashes)))
        await asyncio.sleep(5)
        short = site.enter("short", SHORT)
        held[1].charge.release()
        await short
        assert site.order == ["short"]
        held[0].charge.release()
        await cached

    run_virtual(main())


def test_who_will_not_wait_is_asked_only_for_its_own_lane() -> None:
    async def main() -> None:
        site = Site()
        await site.hold("computing")
        site.enter("long", LONG)
        await asyncio.sleep(0.1)
        await site.enter("short", SHORT, reject_if_busy=True)
        with pytest.raises(Overloaded):
            await site.enter("another long", LONG, reject_if_busy=True)
        assert site.order == ["short"]

    run_virtual(main())


def test_a_queue_full_of_long_prompts_takes_a_short_one_that_need_not_wait() -> None:
    async def main() -> None:
        site = Site(max_queued_requests=2)
        await site.hold("computing")
        for _ in range(2):
            site.enter("long", LONG)
        await asyncio.sleep(0.1)
        await site.enter("short", SHORT)
        with pytest.raises(Overloaded):
            await site.enter("long", LONG)

    run_virtual(main())


@hypothesis_settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([40, 900, 1_100, 5_000, 20_000]), st.floats(0, 3)),
        min_size=1,
        max_size=25,
    )
)
def test_everybody_is_served_by_a_worker_that_shares_its_time(
    arrivals: list[tuple[int, float]],
) -> None:
    async def main() -> None:
        site = Site(max_prefill_queue_s=1.0)
        waited_s: list[float] = []

        async def one(tokens: int) -> None:
            entered_s = site.clock()
            request = RouteRequest(tokens, (), 10)
            route = await site.queue.enter(request, site.clock() + 10_000)
            waited_s.append(site.clock() - entered_s)
            for computed in range(0, tokens, 1_000):
                route.charge.prefill_progress(computed)
                await asyncio.sleep(2)
            route.charge.decode_started()
            await asyncio.sleep(1)
            route.charge.release()

        tasks = []
        for tokens, gap_s in arrivals:
            tasks.append(asyncio.ensure_future(one(tokens)))
            await asyncio.sleep(gap_s)
        await asyncio.gather(*tasks)
        assert len(waited_s) == len(arrivals)
        assert not len(site.queue)
        assert state(site.router).prefill.load == 0

    run_virtual(main())
