"""Chooses the workers of each request of one model, and charges them at once.

Owns the workers' states, the prefix index, the sessions' homes and what has been measured. Called
from one thread; a choice and its charge are one call, so that no burst falls on one worker. Never
waits: `admission` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from twinfire.gateway.routing.affinity import SessionBindings
from twinfire.gateway.routing.costs import CostModel
from twinfire.gateway.routing.demand import Demand
from twinfire.gateway.routing.drain_rate import DrainRate
from twinfire.gateway.routing.lane import Lane
from twinfire.gateway.routing.leg_decision import HAND_OFF_REASONS, decide_leg
from twinfire.gateway.routing.output_lengths import OutputLengths
from twinfire.gateway.routing.policies import Balanced, Policy
from twinfire.gateway.routing.prefix_index import PrefixIndex
from twinfire.gateway.routing.route import (
    AllBusy,
    NoWorker,
    PdPolicy,
    PullHint,
    Route,
    RouteReason,
    RouteRequest,
)
from twinfire.gateway.routing.route_charge import RouteCharge
from twinfire.gateway.routing.routing_settings import RoutingSettings
from twinfire.gateway.routing.routing_tallies import RoutingTallies
from twinfire.gateway.routing.speculative_index import SpeculativeIndex
from twinfire.gateway.routing.worker_pool import WorkerPool
from twinfire.gateway.routing.worker_state import WorkerState
from twinfire.protocol.messages import CacheEvents, Load, Role, WorkerInfo


class Router:
    """Routing of one model over its pools."""

    def __init__(
        self,
        clock: Callable[[], float],
        settings: RoutingSettings | None = None,
        policy: Callable[[CostModel, RoutingSettings], Policy] = Balanced,
    ) -> None:
        """`clock` gives seconds that never go back."""
        self.settings = settings or RoutingSettings()
        self.costs = CostModel(self.settings)
        self.policy = policy(self.costs, self.settings)
        self.tallies = RoutingTallies()
        self.lengths = OutputLengths(self.settings.prior_output_tokens)
        self.index = PrefixIndex(self.settings.max_indexed_blocks)
        self.pool = WorkerPool(self.settings)
        self.sessions = SessionBindings(self.settings.session_ttl_s, self.settings.max_sessions)
        self._speculation = SpeculativeIndex(self.settings.speculation_s)
        self._drain_rate = DrainRate(clock)
        self._clock = clock
        self._num_choices = 0
        self._on_room: Callable[[], None] | None = None

    def when_room(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever a request that nobody could take may find a place."""
        self._on_room = callback

    def worker_joined(self, info: WorkerInfo) -> None:
        """Take a worker's life into the pool; one that is known starts from nothing."""
        self.pool.add(info)
        self.index.add_worker(info.instance_id, info.num_kv_blocks)
        self._room()

    def worker_left(self, instance_id: str) -> None:
        """Forget a worker's life. Charges on it may still be released, to no effect."""
        self.pool.remove(instance_id)
        self.index.remove_worker(instance_id)
        self._room()

    def worker_changed(
        self, instance_id: str, *, role: Role | None = None, draining: bool | None = None
    ) -> None:
        """Take a new role, or the start or end of draining."""
        self.pool.change(instance_id, role=role, draining=draining)
        self._room()

    def observe_load(self, instance_id: str, load: Load) -> None:
        """Take a worker's report, after everything else that its frame says of our requests."""
        if self.pool.observe_load(instance_id, load, self._clock()):
            self._room()

    def observe_cache(self, instance_id: str, events: CacheEvents) -> bool:
        """Take cache events; False (once) after a gap: ask the worker for all anew."""
        return self.index.observe(instance_id, events)

    def observe_transfer(self, num_bytes: int, seconds: float) -> None:
        """Take how long KV took from one worker to another."""
        self.costs.observe_transfer(num_bytes, seconds)

    def check_can_ever_fit(self, request: RouteRequest) -> None:
        """Raise InvalidRequest when no worker could serve the request, even an empty one."""
        self.pool.check_can_ever_fit(request)

    def retry_after_s(self, queued_tokens: int = 0, queued_blocks: int = 0) -> float:
        """Seconds until what is queued and what the workers have is likely to be done."""
        return max(
            self.pool.prefill_drain_s(queued_tokens), self._drain_rate.seconds_for(queued_blocks)
        )

    def num_blocks_wanted(self, request: RouteRequest) -> int:
        """KV blocks of the request with its expected output."""
        return self._num_blocks(request, self._expected_tokens(request))

    def lane(self, request: RouteRequest) -> Lane | None:
        """Return the lane of the prompt where most of it is held; None without workers."""
        try:
            decoders, prefillers, _ = self.pool.candidates(request, self._pd_policy(request))
        except NoWorker:
            return None
        num_uncached = request.num_context_tokens
        step_tokens = max(one.step_tokens for one in prefillers or decoders)
        if num_uncached > step_tokens:
            depths, _ = self._cached_blocks(request, self._clock())
            num_uncached -= max(depths.values(), default=0) * self.pool.block_size
        return "short" if num_uncached <= step_tokens else "long"

    def route(self, request: RouteRequest) -> Route:
        """Choose and charge the workers of one attempt.

        Raises NoWorker when none may be asked, AllBusy when all are full, InvalidRequest when none
        could ever take it.
        """
        self.check_can_ever_fit(request)
        expected = self._expected_tokens(request)
        num_blocks = self._num_blocks(request, expected)
        policy = self._pd_policy(request)
        decoders, prefillers, reason = self.pool.candidates(request, policy)
        decoders = self.pool.with_room(decoders, num_blocks)
        if not decoders:
            raise self._all_busy(request, num_blocks, None)
        now_s = self._clock()
        cached, most_cached = self._cached_blocks(request, now_s)
        demand = Demand(
            num_tokens=request.num_context_tokens,
            block_size=self.pool.block_size,
            num_blocks=num_blocks,
            num_expected_tokens=expected,
            kv_bytes_per_block=decoders[0].info.kv_bytes_per_block,
            cached_blocks=cached,
            most_cached_blocks=most_cached,
            pd_policy=policy,
            home=self.sessions.home(request.affinity, prefillers, decoders, now_s),
        )
        return self._chosen(request, demand, decoders, prefillers, reason, now_s)

    def _chosen(
        self,
        request: RouteRequest,
        demand: Demand,
        decoders: Sequence[WorkerState],
        prefillers: Sequence[WorkerState],
        reason: RouteReason | None,
        now_s: float,
    ) -> Route:
        def lane_of(worker: WorkerState) -> Lane:
            return worker.lane(self.costs.tokens_to_compute(worker, demand))

        if prefillers:
            prefillers = self.pool.with_free_lane(prefillers, lane_of) or prefillers
        else:
            decoders = self.pool.with_free_lane(decoders, lane_of) or decoders
        prefill = self._prefill(demand, prefillers, decoders[0] if len(decoders) == 1 else None)
        decode = self.policy.choose_decode(demand, decoders, prefill)
        if prefill is decode:
            prefill = self._prefill(demand, prefillers, decode)
        if reason is None:
            reason = decide_leg(self.costs, self.settings, demand, decode, prefill)
        if reason not in HAND_OFF_REASONS:
            prefill = None
        computing = prefill or decode
        lane = lane_of(computing)
        if not self.pool.with_free_lane((computing,), lane_of):
            raise self._all_busy(request, demand.num_blocks, lane)
        self.tallies.reasons[reason] += 1
        self._num_choices += 1
        for worker in {decode, computing}:
            worker.last_used = self._num_choices
        self._speculation.insert(request.block_hashes, computing.instance_id, now_s)
        if request.affinity is not None:
            bound = prefill.instance_id if prefill else None
            self.sessions.bind(
                request.affinity, decode=decode.instance_id, prefill=bound, now_s=now_s
            )
        pull = self._pull_hint(computing, demand)
        num_to_compute = demand.uncached_tokens(computing.instance_id)
        if pull is not None:
            num_to_compute = demand.num_tokens - pull.num_blocks * demand.block_size
        return Route(
            decode=decode.instance_id,
            prefill=prefill.instance_id if prefill else None,
            reason=reason,
            uncached_on_decode=demand.uncached_tokens(decode.instance_id),
            uncached_on_prefill=demand.uncached_tokens(computing.instance_id),
            num_to_compute=num_to_compute,
            pull=pull,
            charge=self._charge(request, demand, decode, computing, num_to_compute, now_s),
        )

    def _prefill(
        self, demand: Demand, workers: Sequence[WorkerState], but: WorkerState | None
    ) -> WorkerState | None:
        if but is not None:
            workers = [one for one in workers if one is not but]
        return self.policy.choose_prefill(demand, workers) if workers else None

    def _all_busy(self, request: RouteRequest, num_blocks: int, lane: Lane | None) -> AllBusy:
        self.tallies.num_busy += 1
        retry_after_s = self.retry_after_s(request.num_context_tokens, num_blocks)
        return AllBusy("every worker is busy", retry_after_s, lane)

    def _charge(
        self,
        request: RouteRequest,
        demand: Demand,
        decode: WorkerState,
        computing: WorkerState,
        num_to_compute: int,
        now_s: float,
    ) -> RouteCharge:
        predicted = demand.num_tokens - num_to_compute
        return RouteCharge(
            num_context_tokens=demand.num_tokens,
            num_choices=request.num_choices,
            num_output_before=request.num_output_tokens,
            block_size=demand.block_size,
            prefill=computing.charge_prefill(num_to_compute, request.request_id, now_s),
            decode=decode.decode.open(demand.num_blocks),
            decode_computes_prompt=computing is decode,
            on_cached=lambda truth: self.tallies.compare(predicted, truth),
            on_computed=lambda: self._computed(computing),
            on_end=self._ended,
        )

    def _computed(self, worker: WorkerState) -> None:
        if self.pool.is_awaited_no_more(worker):
            self._room()

    def _ended(self, num_blocks: int, length: int | None) -> None:
        self._drain_rate.observe(num_blocks)
        if length is not None:
            self.lengths.observe(length)
        self._room()

    def _pull_hint(self, computing: WorkerState, demand: Demand) -> PullHint | None:
        if not self.costs.pull_gain_s(computing, demand):
            return None
        holders = [
            worker
            for instance_id, blocks in demand.cached_blocks.items()
            if blocks >= demand.most_cached_blocks
            and (worker := self.pool.get(instance_id)) is not None
            and worker.info.peer is not None
        ]
        if not holders:
            return None
        holder = min(holders, key=lambda one: (one.prefill.load, one.last_used))
        self.tallies.num_pull_hints += 1
        return PullHint(holder.instance_id, demand.most_cached_blocks)

    def _cached_blocks(self, request: RouteRequest, now_s: float) -> tuple[dict[str, int], int]:
        """Blocks held or promised by each worker, and the most that one holds already."""
        hashes = request.block_hashes
        # The last token is always computed, for what is drawn after it.
        most = (request.num_context_tokens - 1) // self.pool.block_size
        if len(hashes) > most:
            hashes = hashes[:most]
        depths = self.index.lookup(hashes)
        most_held = max(depths.values(), default=0)
        self._speculation.raise_depths(hashes, depths, now_s)
        return depths, most_held

    def _pd_policy(self, request: RouteRequest) -> PdPolicy:
        return request.pd_policy or self.settings.pd_policy

    def _expected_tokens(self, request: RouteRequest) -> int:
        return self.lengths.expected(request.max_tokens, request.num_output_tokens)

    def _num_blocks(self, request: RouteRequest, expected: int) -> int:
        size = self.pool.block_size
        first = -(-(request.num_context_tokens + expected) // size)
        return first + (request.num_choices - 1) * -(-expected // size)

    def _room(self) -> None:
        if self._on_room is not None:
            self._on_room()

    def workers(self) -> Iterator[WorkerState]:
        """Iterate the states of all workers, for status and metrics."""
        return iter(self.pool)
