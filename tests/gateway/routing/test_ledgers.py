from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from support.routing_workers import BLOCK_TOKENS, ManualClock, load_report, worker_info
from twinfire.gateway.routing.ledger import Ledger
from twinfire.gateway.routing.route import Route, RouteRequest
from twinfire.gateway.routing.router import Router
from twinfire.gateway.routing.worker_state import WorkerState

TOKENS = st.integers(-50, 5_000)


def request(tokens: int = 1_000, **fields: object) -> RouteRequest:
    return RouteRequest(tokens, (), 100, **fields)  # type: ignore[arg-type]


def worker(router: Router, instance_id: str) -> WorkerState:
    state = router.pool.get(instance_id)
    assert state is not None
    return state


@given(st.lists(st.tuples(st.sampled_from(["open", "charge", "see", "close", "report"]), TOKENS)))
def test_a_ledger_is_never_negative_and_ends_at_zero(steps: list[tuple[str, int]]) -> None:
    ledger = Ledger()
    entries = [ledger.open(10)]
    for number, (what, amount) in enumerate(steps):
        entry = entries[number % len(entries)]
        if what == "open":
            entries.append(ledger.open(amount))
        elif what == "report":
            ledger.report(max(amount, 0))
        elif what == "close":
            entry.close()
        else:
            (entry.charge if what == "charge" else entry.see)(amount)
        assert ledger.load >= 0
        assert 0 <= ledger.seen <= ledger.charged == sum(one.charged for one in entries)
    for entry in entries:
        entry.close()
        entry.close()
    ledger.report(0)
    assert (ledger.charged, ledger.seen, ledger.load, ledger.num_entries) == (0, 0, 0, 0)


EVENTS = ["prefill_progress", "prefill_done", "decode_reserved", "decode_started", "decode_tokens"]


@given(
    st.lists(st.tuples(st.sampled_from([*EVENTS, "release", "route"]), st.integers(0, 2_000))),
    st.sampled_from(["always", "never"]),
)
def test_charges_in_any_order_never_go_negative_and_all_come_back(
    steps: list[tuple[str, int]], policy: str
) -> None:
    router = Router(ManualClock())
    router.worker_joined(worker_info("p", "prefill", num_kv_blocks=100_000))
    router.worker_joined(worker_info("d", "decode", num_kv_blocks=100_000))
    router.observe_load("p", load_report(prefill_tokens_per_s=1e9))
    router.observe_load("d", load_report(prefill_tokens_per_s=1e9))
    routes = [router.route(request(pd_policy=policy, num_choices=2))]
    for number, (what, amount) in enumerate(steps):
        charge = routes[number % len(routes)].charge
        if what == "route":
            routes.append(router.route(request(1 + amount, pd_policy=policy)))
        elif what in ("prefill_progress", "decode_tokens"):
            getattr(charge, what)(amount)
        else:
            getattr(charge, what)()
        for state in router.workers():
            assert state.prefill.load >= 0
            assert state.decode.load >= 0
    for route in routes:
        route.charge.release()
        route.charge.release()
        route.charge.decode_tokens(5)
    for state in router.workers():
        assert (state.prefill.load, state.decode.load) == (0, 0)
        assert (state.prefill.num_entries, state.decode.num_entries) == (0, 0)


def test_prompt_tokens_are_given_back_chunk_by_chunk_and_blocks_at_the_end() -> None:
    router = Router(ManualClock())
    router.worker_joined(worker_info("p", "prefill"))
    router.worker_joined(worker_info("d", "decode"))
    route = router.route(request(1_000, pd_policy="always"))
    p, d = worker(router, "p"), worker(router, "d")
    blocks = -(-1_100 // BLOCK_TOKENS)
    assert (route.decode, route.prefill) == ("d", "p")
    assert (p.prefill.load, d.decode.load, p.decode.load, d.prefill.load) == (1_000, blocks, 0, 0)
    route.charge.prefill_progress(512)
    assert p.prefill.load == 488
    route.charge.prefill_progress(256)
    assert p.prefill.load == 488
    route.charge.decode_started()
    assert (p.prefill.load, d.decode.load) == (0, blocks)
    route.charge.decode_tokens(200)
    assert d.decode.load == -(-1_200 // BLOCK_TOKENS)
    route.charge.release()
    assert d.decode.load == 0


def test_charges_of_a_life_do_not_touch_the_next_one() -> None:
    router = Router(ManualClock())
    router.worker_joined(worker_info("first life"))
    old = router.route(request()).charge
    router.worker_left("first life")
    router.worker_joined(worker_info("second life"))
    new = router.route(request())
    before = worker(router, "second life").decode.load
    old.decode_started()
    old.release()
    assert worker(router, "second life").decode.load == before > 0
    # The same life again, after its link was cut: what was charged before went with the link.
    router.worker_joined(worker_info("second life"))
    new.charge.release()
    assert worker(router, "second life").decode.load == 0


class SharedWorker:
    """One worker that two gateways use, computing nothing until told."""

    def __init__(self) -> None:
        self.requests: dict[tuple[int, int], int] = {}
        self.blocks = 0

    def report(self, gateway: int) -> object:
        last = max((i for g, i in self.requests if g == gateway), default=0)
        waiting = sum(self.requests.values())
        return load_report(
            prefill_tokens_waiting=waiting, kv_blocks_used=self.blocks, last_charge=last
        )


def test_two_gateways_see_each_others_load_and_count_their_own_once() -> None:
    shared = SharedWorker()
    gateways = [Router(ManualClock()) for _ in range(2)]
    for gateway in gateways:
        gateway.worker_joined(worker_info("w"))
    routes: list[Route] = []

    def send(number: int, request_id: int, tokens: int, *, arrives: bool = True) -> None:
        asked = RouteRequest(tokens, (), 100, request_id=request_id)
        routes.append(gateways[number].route(asked))
        if arrives:
            shared.requests[number, request_id] = tokens

    def loads() -> list[int]:
        for number, gateway in enumerate(gateways):
            gateway.observe_load("w", shared.report(number))  # type: ignore[arg-type]
        return [worker(gateway, "w").prefill.load for gateway in gateways]

    send(0, 1, 500)
    send(1, 1, 300)
    assert loads() == [800, 800]
    # On its way: only the gateway that sent it knows.
    send(0, 2, 200, arrives=False)
    assert loads() == [1_000, 800]
    shared.requests[0, 2] = 200
    assert loads() == [1_000, 1_000]
    # Progress of our own counts before the next report, that of the other one with it.
    routes[0].charge.prefill_progress(400)
    assert worker(gateways[0], "w").prefill.load == 600
    shared.requests[0, 1] = 100
    shared.requests[1, 1] = 50
    assert loads() == [350, 350]
    routes[1].charge.release()
    del shared.requests[1, 1]
    assert loads() == [300, 300]
    routes[0].charge.release()
    routes[2].charge.release()
    shared.requests.clear()
    assert loads() == [0, 0]


def test_blocks_of_another_gateway_and_shared_blocks_follow_the_report() -> None:
    router = Router(ManualClock())
    router.worker_joined(worker_info("w", "decode"))
    first = router.route(request(960))
    second = router.route(request(960))
    state = worker(router, "w")
    growth = -(-1_060 // BLOCK_TOKENS) - 30
    for route in (first, second):
        route.charge.decode_started()
    # 100 blocks of somebody else's.
    router.observe_load("w", load_report(kv_blocks_used=160))
    assert state.decode.load == 160 + 2 * growth
    # Both share 20 blocks and the other gateway is gone.
    router.observe_load("w", load_report(kv_blocks_used=40))
    assert state.decode.load == 40 + 2 * growth
    second.charge.release()
    router.observe_load("w", load_report(kv_blocks_used=30))
    assert state.decode.load == 30 + growth


def test_a_retry_with_an_old_request_id_is_not_taken_for_reported() -> None:
    clock = ManualClock()
    router = Router(clock)
    router.worker_joined(worker_info("w"))
    router.observe_load("w", load_report(last_charge=9))
    router.route(RouteRequest(700, (), 100, request_id=5))
    router.observe_load("w", load_report(last_charge=9))
    assert worker(router, "w").prefill.load == 700
    clock.now_s += 1.5
    router.observe_load("w", load_report(prefill_tokens_waiting=700, last_charge=9))
    assert worker(router, "w").prefill.load == 700


def test_expected_growth_follows_real_answers_and_max_tokens() -> None:
    router = Router(ManualClock())
    router.worker_joined(worker_info("w", num_kv_blocks=5_000))
    for _ in range(300):
        route = router.route(RouteRequest(32, (), 4_000))
        route.charge.decode_started()
        route.charge.decode_tokens(64)
        route.charge.release()
    router.route(RouteRequest(32, (), 4_000))
    assert worker(router, "w").decode.load == 3
    cancelled = router.route(RouteRequest(32, (), 32))
    assert worker(router, "w").decode.load == 5
    cancelled.charge.decode_tokens(1)
    cancelled.charge.release(finished=False)
    assert router.lengths.mean_tokens == 64
