"""Ways to choose a worker, as small classes behind one protocol.

Each gets only workers that can take the request now. Ties go to the worker unused for longest:
taking the first of a list always overloads the first of the list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import add
from typing import Protocol

from twinfire.gateway.routing.costs import CostModel
from twinfire.gateway.routing.demand import Demand
from twinfire.gateway.routing.routing_settings import RoutingSettings
from twinfire.gateway.routing.worker_state import WorkerState


class Policy(Protocol):
    """Chooses among at least one worker."""

    def choose_prefill(self, demand: Demand, workers: Sequence[WorkerState]) -> WorkerState:
        """Return the worker that would compute the prompt for another one."""
        ...

    def choose_decode(
        self, demand: Demand, workers: Sequence[WorkerState], prefill: WorkerState | None
    ) -> WorkerState:
        """Return the worker that decodes; `prefill` is what `choose_prefill` returned, if asked."""
        ...


class RoundRobin:
    """In turn."""

    def choose_prefill(self, demand: Demand, workers: Sequence[WorkerState]) -> WorkerState:
        """Return the one unused for longest."""
        return min(workers, key=_last_used)

    def choose_decode(
        self, demand: Demand, workers: Sequence[WorkerState], prefill: WorkerState | None
    ) -> WorkerState:
        """Return the one unused for longest."""
        return min(workers, key=_last_used)


class LeastRequests:
    """Fewest open requests of ours, whatever their size."""

    def choose_prefill(self, demand: Demand, workers: Sequence[WorkerState]) -> WorkerState:
        """Return the one with the fewest prompts open."""
        return min(workers, key=lambda one: (one.prefill.num_entries, one.last_used))

    def choose_decode(
        self, demand: Demand, workers: Sequence[WorkerState], prefill: WorkerState | None
    ) -> WorkerState:
        """Return the one with the fewest requests open."""
        return min(workers, key=lambda one: (one.decode.num_entries, one.last_used))


class LeastTokens:
    """Fewest uncomputed prompt tokens, fewest KV blocks; caches do not count."""

    def choose_prefill(self, demand: Demand, workers: Sequence[WorkerState]) -> WorkerState:
        """Return the one with the fewest tokens to compute."""
        return min(workers, key=lambda one: (one.prefill.load, one.last_used))

    def choose_decode(
        self, demand: Demand, workers: Sequence[WorkerState], prefill: WorkerState | None
    ) -> WorkerState:
        """Return the one with the fewest blocks in use."""
        return min(workers, key=lambda one: (one.decode.load, one.last_used))


class PrefixAware:
    """The longest prefix when it is a good part of the prompt and requests are spread evenly.

    Otherwise the fewest requests. This is what cache-aware routers commonly do, with their limits.
    """

    MIN_SHARE = 0.5
    MAX_DIFFERENCE = 32
    MAX_RATIO = 1.1

    def choose_prefill(self, demand: Demand, workers: Sequence[WorkerState]) -> WorkerState:
        """Choose by the prompts open."""
        return self._choose(demand, workers, lambda one: one.prefill.num_entries)

    def choose_decode(
        self, demand: Demand, workers: Sequence[WorkerState], prefill: WorkerState | None
    ) -> WorkerState:
        """Choose by the requests open."""
        return self._choose(demand, workers, lambda one: one.decode.num_entries)

    def _choose(
        self, demand: Demand, workers: Sequence[WorkerState], count: Callable[[WorkerState], int]
    ) -> WorkerState:
        counts = [count(one) for one in workers]
        most, least = max(counts), min(counts)
        is_even = most - least <= self.MAX_DIFFERENCE or most <= self.MAX_RATIO * least
        cached = demand.cached_blocks
        best = min(
            workers, key=lambda one: (-cached.get(one.instance_id, 0), count(one), one.last_used)
        )
        share = cached.get(best.instance_id, 0) * demand.block_size / demand.num_tokens
        if is_even and share > self.MIN_SHARE:
            return best
        return min(workers, key=lambda one: (count(one), one.last_used))


class Balanced:
    """Ours: least seconds, in which tokens, caches and transfers all count.

    A session stays where it is at home until that costs a set time more than the best.
    """

    def __init__(self, costs: CostModel, settings: RoutingSettings) -> None:
        self._costs = costs
        self._settings = settings
        self.num_kept_home = 0
        self.num_escaped = 0

    def choose_prefill(self, demand: Demand, workers: Sequence[WorkerState]) -> WorkerState:
        """Return the worker that has the prompt computed first."""
        costs = self._costs.prompt_s(workers, demand)
        return self._cheapest(workers, costs, demand.home.prefill, demand)

    def choose_decode(
        self, demand: Demand, workers: Sequence[WorkerState], prefill: WorkerState | None
    ) -> WorkerState:
        """Return the worker that would have the whole answer first, by the better way for each."""
        model = self._costs
        decode_s = model.decode_s(workers, demand)
        if prefill is None:
            first_s = model.prompt_s(workers, demand)
        else:
            (elsewhere_s,) = model.prompt_s((prefill,), demand)
            first_s = model.hand_off_s(workers, model.compute_s(prefill, demand), demand)
            first_s = [elsewhere_s + one for one in first_s]
            if demand.pd_policy != "always":
                first_s = list(map(min, first_s, model.prompt_s(workers, demand)))
        costs = list(map(add, decode_s, first_s))
        return self._cheapest(workers, costs, demand.home.decode, demand)

    def _cheapest(
        self,
        workers: Sequence[WorkerState],
        costs: Sequence[float],
        home: WorkerState | None,
        demand: Demand,
    ) -> WorkerState:
        best_s = min(costs)
        if home is not None and home in workers:
            settings = self._settings
            is_warm = demand.home.is_bound
            escape_s = settings.session_escape_s if is_warm else settings.first_home_escape_s
            if costs[workers.index(home)] <= best_s + escape_s:
                self.num_kept_home += 1
                return home
            self.num_escaped += 1
        limit_s = best_s + self._settings.tie_s
        equal = [one for one, cost in zip(workers, costs, strict=True) if cost <= limit_s]
        return min(equal, key=_last_used)


def _last_used(worker: WorkerState) -> int:
    return worker.last_used
