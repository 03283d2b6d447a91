from __future__ import annotations

from typing import get_args

import pytest

from support.routing_workers import BLOCK_TOKENS, ManualClock, chain, load_report, worker_info
from twinfire.gateway.routing.policies import LeastRequests, LeastTokens, PrefixAware, RoundRobin
from twinfire.gateway.routing.route import AllBusy, NoWorker, Route, RouteReason, RouteRequest
from twinfire.gateway.routing.router import Router
from twinfire.gateway.routing.routing_settings import RoutingSettings
from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.messages import CacheEvents, Role


def router_with(
    *workers: tuple[str, Role], settings: RoutingSettings | None = None, rate: float = 10_000.0
) -> Router:
    router = Router(ManualClock(), settings)
    for name, role in workers:
        router.worker_joined(worker_info(name, role))
        router.observe_load(name, load_report(prefill_tokens_per_s=rate, decode_step_s=0.01))
    return router


PD = (("p0", "prefill"), ("p1", "prefill"), ("d0", "decode"), ("d1", "decode"))
MIXED = (("m0", "mixed"), ("m1", "mixed"))


def ask(
    router: Router, tokens: int = 2_000, blocks: list[bytes] | None = None, **more: object
) -> Route:
    return router.route(RouteRequest(tokens, blocks or [], 100, **more))  # type: ignore[arg-type]


def hold(router: Router, name: str, hashes: list[bytes], sequence: int = 0) -> None:
    assert router.observe_cache(name, CacheEvents(sequence, stored=b"".join(hashes)))


def busy(router: Router, name: str, running: int) -> None:
    router.observe_load(
        name, load_report(running=running, prefill_tokens_per_s=10_000, decode_step_s=0.01)
    )


def test_equal_workers_are_used_in_turn() -> None:
    router = router_with(*PD)
    routes = []
    for _ in range(8):
        routes.append(ask(router, pd_policy="always"))
        routes[-1].charge.release()
    assert [one.prefill for one in routes[:4]] == ["p0", "p1", "p0", "p1"]
    assert [one.decode for one in routes[:4]] == ["d0", "d1", "d0", "d1"]


def test_a_burst_is_spread_because_a_choice_is_charged_at_once() -> None:
    router = router_with(*PD)
    routes = [ask(router, pd_policy="always") for _ in range(10)]
    for pool in (["p0", "p1"], ["d0", "d1"]):
        used = [route.prefill if pool[0] == "p0" else route.decode for route in routes]
        assert [used.count(name) for name in pool] == [5, 5]


def test_a_faster_worker_gets_more() -> None:
    router = router_with(*PD)
    router.observe_load("p0", load_report(prefill_tokens_per_s=30_000))
    used = [ask(router, pd_policy="always").prefill for _ in range(8)]
    assert used.count("p0") >= 6


class TestLegs:
    """Who computes the prompt, and the reason that is counted."""

    def test_an_idle_decode_worker_does_it_alone(self) -> None:
        router = router_with(*PD)
        route = ask(router)
        assert (route.prefill, route.reason) == (None, "decode_idle")
        assert router.tallies.reasons["decode_idle"] == 1

    def test_a_prompt_that_would_hold_up_streams_is_handed_over(self) -> None:
        router = router_with(*PD)
        for name in ("d0", "d1"):
            busy(router, name, 8)
        route = ask(router)
        assert route.reason == "cheaper"
        assert route.prefill in ("p0", "p1")
        assert route.uncached_on_decode == route.uncached_on_prefill == 2_000

    def test_a_short_suffix_stays(self) -> None:
        router = router_with(*PD)
        for name in ("d0", "d1"):
            busy(router, name, 8)
        hold(router, "d1", chain(*range(62)))
        route = ask(router, 2_000, chain(*range(62)))
        assert (route.decode, route.prefill, route.reason) == ("d1", None, "short_suffix")
        assert route.uncached_on_decode == 2_000 - 62 * BLOCK_TOKENS

    def test_busy_prefill_workers_are_spared(self) -> None:
        router = router_with(*PD)
        for name in ("d0", "d1"):
            busy(router, name, 2)
        for name in ("p0", "p1"):
            router.observe_load(
                name, load_report(prefill_tokens_waiting=19_000, prefill_tokens_per_s=10_000)
            )
        assert ask(router).reason == "prefill_busy"

    def test_a_slow_link_makes_it_cheaper_alone(self) -> None:
        router = router_with(*PD)
        for name in ("d0", "d1"):
            busy(router, name, 1)
        for _ in range(100):
            router.observe_transfer(1_000_000, 1.0)
        assert ask(router).reason == "decode_cheaper"

    def test_policy_by_request_and_pools_that_are_empty(self) -> None:
        router = router_with(*PD)
        assert ask(router, pd_policy="never").reason == "never"
        assert ask(router, pd_policy="always").reason == "always"
        everyone_but_d0 = frozenset({"p0", "p1", "d1"})
        assert (
            ask(router, pd_policy="always", exclude=everyone_but_d0).reason == "no_prefill_worker"
        )
        route = ask(router, exclude=frozenset({"d0", "d1"}))
        assert (route.reason, route.prefill) == ("no_decode_worker", None)
        assert route.decode in ("p0", "p1")

    def test_mixed_workers_serve_alone_unless_all_prompts_are_to_move(self) -> None:
        router = router_with(*MIXED)
        for name in ("m0", "m1"):
            busy(router, name, 8)
        assert ask(router).reason == "no_prefill_worker"
        route = ask(router, pd_policy="always")
        assert {route.prefill, route.decode} == {"m0", "m1"}

    def test_every_reason_is_of_the_closed_set(self) -> None:
        assert len(get_args(RouteReason)) == 9


def test_a_resumed_request_counts_its_output_as_context() -> None:
    router = router_with(*MIXED)
    route = ask(router, 1_000, num_output_tokens=60)
    assert route.uncached_on_decode == 1_060
    state = router.pool.get(route.decode)
    assert state is not None
    assert state.prefill.load == 1_060
    assert state.decode.load == -(-1_100 // BLOCK_TOKENS)


def test_the_last_token_of_a_whole_hit_is_left_to_compute() -> None:
    router = router_with(("m0", "mixed"))
    hold(router, "m0", chain(*range(10)))
    assert ask(router, 320, chain(*range(10))).uncached_on_decode == BLOCK_TOKENS


@pytest.mark.parametrize("limits", [{"max_model_len": 1_000}, {"num_kv_blocks": 30}])
def test_a_request_goes_where_it_fits(limits: dict[str, int]) -> None:
    router = router_with(("p0", "prefill"), settings=RoutingSettings(pd_policy="always"))
    router.worker_joined(worker_info("d0", "decode", **limits))
    alone = ask(router, 2_000)
    assert (alone.decode, alone.prefill, alone.reason) == ("p0", None, "no_decode_worker")
    short = ask(router, 500)
    assert (short.decode, short.prefill) == ("d0", "p0")
    router.worker_joined(worker_info("d1", "decode"))
    long = ask(router, 2_000)
    assert (long.decode, long.prefill) == ("d1", "p0")
    router.worker_left("p0")
    router.worker_left("d1")
    with pytest.raises(InvalidRequest):
        ask(router, 2_000)


def test_a_draining_worker_gets_nothing_and_a_new_role_counts_at_once() -> None:
    router = router_with(*MIXED)
    router.worker_changed("m0", draining=True)
    assert {ask(router).decode for _ in range(3)} == {"m1"}
    router.worker_changed("m0", draining=False, role="prefill")
    assert ask(router, pd_policy="always").prefill == "m0"
    router.worker_changed("m1", draining=True)
    router.worker_changed("m0", draining=True)
    with pytest.raises(NoWorker):
        ask(router)


class TestLimits:
    def test_what_can_never_fit_is_refused(self) -> None:
        router = router_with(*MIXED)
        with pytest.raises(InvalidRequest, match="longest") as caught:
            ask(router, 16_300)
        assert (caught.value.param, caught.value.code) == ("max_tokens", "context_length_exceeded")
        router = Router(ManualClock())
        router.worker_joined(worker_info("small", num_kv_blocks=10))
        with pytest.raises(InvalidRequest, match="KV blocks"):
            ask(router, 300)
        router.worker_joined(worker_info("large"))
        assert ask(router, 300).decode == "large"

    def test_full_caches_are_waited_for(self) -> None:
        router = router_with(("m0", "mixed"), settings=RoutingSettings(max_prefill_queue_s=1e9))
        routes = [ask(router, 10_000) for _ in range(3)]
        with pytest.raises(AllBusy) as caught:
            ask(router, 10_000)
        assert caught.value.retry_after_s > 0
        routes[0].charge.release()
        assert ask(router, 10_000)

    def test_a_long_prompt_queue_is_not_made_longer(self) -> None:
        router = router_with(*PD)
        for _ in range(6):
            ask(router, 10_000, pd_policy="always")
        with pytest.raises(AllBusy):
            ask(router, 10_000, pd_policy="always")
        for name in ("p0", "p1"):
            state = router.pool.get(name)
            assert state is not None
            assert state.prefill.load == 30_000

    def test_no_worker_at_all(self) -> None:
        with pytest.raises(NoWorker):
            ask(Router(ManualClock()))


class TestAffinity:
    def test_a_session_stays_when_others_are_a_little_cheaper_and_leaves_when_much(self) -> None:
        router = router_with(*MIXED)
        first = ask(router, affinity="s")
        home = first.decode
        first.charge.release()
        ask(router, 1_000, exclude=frozenset({home} ^ {"m0", "m1"}))
        assert ask(router, affinity="s").decode == home
        router.observe_load(
            home, load_report(prefill_tokens_waiting=15_000, prefill_tokens_per_s=10_000)
        )
        assert ask(router, affinity="s").decode != home

    def test_a_lost_home_is_replaced_and_kept(self) -> None:
        router = router_with(*MIXED, ("m2", "mixed"))
        home = ask(router, affinity="s").decode
        router.worker_left(home)
        second = ask(router, affinity="s").decode
        assert second != home
        router.worker_joined(worker_info("m3"))
        assert ask(router, affinity="s").decode == second

    def test_stickiness_survives_new_workers(self) -> None:
        router = router_with(*MIXED)
        homes = {}
        for number in range(40):
            route = ask(router, 100, affinity=f"s{number}")
            homes[number] = route.decode
            route.charge.release()
        for number in range(8):
            router.worker_joined(worker_info(f"new{number}"))
        for number, home in homes.items():
            route = ask(router, 100, affinity=f"s{number}")
            assert route.decode == home
            route.charge.release()

    def test_gateways_agree_without_telling_each_other(self) -> None:
        names = [(f"m{number}", "mixed") for number in range(8)]
        one, other = router_with(*names), router_with(*reversed(names))  # type: ignore[arg-type]
        homes = []
        for number in range(50):
            routes = [ask(router, 100, affinity=f"s{number}") for router in (one, other)]
            assert routes[0].decode == routes[1].decode
            homes.append(routes[0].decode)
            for route in routes:
                route.charge.release()
        assert len(set(homes)) > 4

    def test_prompts_and_decoding_have_homes_of_their_own(self) -> None:
        router = router_with(*PD)
        first = ask(router, affinity="s", pd_policy="always")
        first.charge.release()
        for _ in range(3):
            ask(router, pd_policy="always").charge.release()
            again = ask(router, affinity="s", pd_policy="always")
            assert (again.prefill, again.decode) == (first.prefill, first.decode)
            again.charge.release()

    def test_bindings_end_with_time_and_are_bounded(self) -> None:
        clock = ManualClock()
        router = Router(clock, RoutingSettings(session_ttl_s=10, max_sessions=5))
        router.worker_joined(worker_info("m0"))
        for number in range(9):
            ask(router, 100, affinity=f"s{number}").charge.release()
        assert len(router.sessions) == 5
        workers = list(router.workers())
        assert router.sessions.home("s8", (), workers, clock()).is_bound
        clock.now_s += 11
        assert not router.sessions.home("s8", (), workers, clock()).is_bound


class TestPulls:
    def test_a_worker_that_lacks_a_prefix_is_told_who_holds_it(self) -> None:
        router = router_with(*PD)
        hold(router, "d0", chain(*range(60)))
        route = ask(router, 2_000, chain(*range(60)), pd_policy="always")
        assert route.pull is not None
        assert (route.pull.holder, route.pull.num_blocks) == ("d0", 60)
        assert route.uncached_on_prefill == 2_000
        state = router.pool.get(route.prefill or "")
        assert state is not None
        assert state.prefill.load == 2_000 - 60 * BLOCK_TOKENS

    def test_a_slow_link_or_a_few_blocks_are_not_worth_it(self) -> None:
        router = router_with(*PD)
        hold(router, "d0", chain(*range(60)))
        few = ask(router, 2_000, chain(0, 1, 99), pd_policy="always", exclude=frozenset({"d0"}))
        assert few.pull is None
        for _ in range(100):
            router.observe_transfer(1_000_000, 1.0)
        assert ask(router, 2_000, chain(*range(60)), pd_policy="always").pull is None

    def test_what_is_only_on_its_way_cannot_be_pulled(self) -> None:
        router = router_with(*PD)
        first = ask(router, 2_000, chain(*range(60)), pd_policy="always")
        second = ask(
            router,
            2_000,
            chain(*range(60)),
            pd_policy="always",
            exclude=frozenset({first.prefill or ""}),
        )
        assert second.pull is None


def test_a_burst_with_one_prefix_goes_where_the_first_went() -> None:
    router = router_with(*PD)
    hashes = chain(*range(300))
    routes = [ask(router, 9_700, hashes, pd_policy="always") for _ in range(3)]
    assert len({route.prefill for route in routes}) == 1
    assert routes[2].uncached_on_prefill == 100


def test_predictions_are_compared_with_the_truth() -> None:
    router = router_with(("m0", "mixed"))
    hold(router, "m0", chain(*range(10)))
    charge = ask(router, 1_000, chain(*range(10))).charge
    charge.decode_started(cached_tokens=128)
    charge.prefill_done(cached_tokens=128)
    tallies = router.tallies
    assert (tallies.predicted_cached_tokens, tallies.true_cached_tokens) == (320, 128)
    assert (tallies.overestimated_tokens, tallies.underestimated_tokens) == (192, 0)


class TestSimplePolicies:
    """Each differs from the others where it should."""

    def route(self, policy: type, *loads: tuple[int, int, int]) -> Route:
        """Loads: own requests, prompt tokens and blocks of others on each prefill worker."""
        router = Router(ManualClock(), policy=lambda costs, settings: policy())
        for number, (own, tokens, held) in enumerate(loads):
            name = f"p{number}"
            router.worker_joined(worker_info(name, "prefill"))
            router.worker_joined(worker_info(f"d{number}", "decode"))
            router.observe_load(
                name, load_report(prefill_tokens_waiting=tokens, prefill_tokens_per_s=1e6)
            )
            if held:
                hold(router, name, chain(*range(held)))
            others = frozenset(one.instance_id for one in router.workers()) - {name, f"d{number}"}
            for _ in range(own):
                ask(router, 1, pd_policy="always", exclude=others)
        return ask(router, 2_000, chain(*range(60)), pd_policy="always")

    def test_round_robin_looks_at_nothing(self) -> None:
        assert self.route(RoundRobin, (2, 0, 60), (1, 0, 0), (0, 9_000, 0)).prefill == "p2"

    def test_least_requests_looks_at_requests(self) -> None:
        assert self.route(LeastRequests, (2, 0, 60), (0, 9_000, 0), (1, 0, 0)).prefill == "p1"

    def test_least_tokens_looks_at_tokens(self) -> None:
        assert self.route(LeastTokens, (0, 9_000, 60), (3, 0, 0), (0, 5_000, 0)).prefill == "p1"

    def test_prefix_aware_looks_at_prefixes_while_requests_are_even(self) -> None:
        assert self.route(PrefixAware, (3, 0, 60), (0, 0, 0)).prefill == "p0"
        assert self.route(PrefixAware, (40, 0, 60), (0, 0, 0)).prefill == "p1"
        assert self.route(PrefixAware, (3, 0, 20), (0, 0, 0)).prefill == "p1"
