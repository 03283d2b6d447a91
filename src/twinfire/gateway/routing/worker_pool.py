"""The workers of one model, by what may be asked of them.

Keeps the lists that every decision starts from, so that a decision does not walk the whole pool to
find them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from twinfire.gateway.routing.lane import Lane
from twinfire.gateway.routing.route import NoWorker, PdPolicy, RouteReason, RouteRequest
from twinfire.gateway.routing.routing_settings import RoutingSettings
from twinfire.gateway.routing.worker_state import WorkerState
from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.messages import Load, Role, WorkerInfo


class WorkerPool:
    """All lives of workers that serve one model."""

    def __init__(self, settings: RoutingSettings) -> None:
        self._settings = settings
        self._workers: dict[str, WorkerState] = {}
        self._measured: set[str] = set()
        self._decoders: list[WorkerState] = []
        self._prefillers: list[WorkerState] = []
        self._only_prefillers: list[WorkerState] = []
        self._shortest = 0
        """Tokens that the least of the workers takes; what is not longer fits on all."""
        self._smallest = 0
        """KV blocks of the one that has the fewest."""
        self.block_size = 1
        """Tokens; equal on all workers of a model."""

    def __iter__(self) -> Iterator[WorkerState]:
        return iter(self._workers.values())

    def __len__(self) -> int:
        return len(self._workers)

    def can_serve(self) -> bool:
        """Whether any worker may be asked."""
        return bool(self._decoders or self._prefillers)

    def get(self, instance_id: str) -> WorkerState | None:
        """Return a worker's state, None when it has left."""
        return self._workers.get(instance_id)

    def add(self, info: WorkerInfo) -> None:
        """Add an instance without any load."""
        self.remove(info.instance_id)
        state = WorkerState(info, self._settings.prior_decode_step_s)
        state.prefill_tokens_per_s = self._prior_rate()
        self._workers[info.instance_id] = state
        self.block_size = info.block_size
        self._sort()

    def remove(self, instance_id: str) -> None:
        """Drop an instance; unknown ids are ignored."""
        self._workers.pop(instance_id, None)
        self._measured.discard(instance_id)
        self._sort()

    def change(self, instance_id: str, *, role: Role | None, draining: bool | None) -> None:
        """Set what is given; unknown ids are ignored."""
        worker = self._workers.get(instance_id)
        if worker is not None:
            worker.role = worker.role if role is None else role
            worker.draining = worker.draining if draining is None else draining
            self._sort()

    def observe_load(self, instance_id: str, load: Load, now_s: float) -> bool:
        """Take a report; return whether the worker may have got room for what waits."""
        worker = self._workers.get(instance_id)
        if worker is None:
            return False
        before = worker.decode.load
        worker.observe_load(load, now_s)
        if load.prefill_tokens_per_s > 0 and instance_id not in self._measured:
            self._measured.add(instance_id)
            for other in self._workers.values():
                if other.instance_id not in self._measured:
                    other.prefill_tokens_per_s = self._prior_rate()
        return worker.decode.load < before or self.is_awaited_no_more(worker)

    def candidates(
        self, request: RouteRequest, policy: PdPolicy
    ) -> tuple[Sequence[WorkerState], Sequence[WorkerState], RouteReason | None]:
        """Return who may decode, who may compute prompts for them, and a reason that is certain.

        Workers that could never hold the request are not among them. Any worker does both where the
        pool for a stage is empty. Mixed workers compute prompts for others only beside prefill
        workers, or when every prompt is to be handed over.
        """
        decoders: Sequence[WorkerState] = self._decoders
        prefillers: Sequence[WorkerState] = self._only_prefillers
        if prefillers or policy == "always":
            prefillers = self._prefillers
        if exclude := request.exclude:
            decoders = [one for one in decoders if one.instance_id not in exclude]
            prefillers = [one for one in prefillers if one.instance_id not in exclude]
        if not self._fits(request, self._shortest, self._smallest):
            decoders = [one for one in decoders if self._fits_on(request, one)]
            prefillers = [one for one in prefillers if self._fits_on(request, one)]
        if not decoders and prefillers:
            return prefillers, (), "no_decode_worker"
        if not decoders:
            raise NoWorker("no worker can take this request now")
        return decoders, (() if policy == "never" else prefillers), None

    def with_room(self, workers: Sequence[WorkerState], num_blocks: int) -> list[WorkerState]:
        """Return those on which so many blocks can be decoded now; an empty one always can."""
        fill = self._settings.max_kv_fill
        return [
            one
            for one in workers
            if not (load := one.decode.load) or load + num_blocks <= fill * one.num_blocks
        ]

    def with_free_lane(
        self, workers: Sequence[WorkerState], lane_of: Callable[[WorkerState], Lane]
    ) -> list[WorkerState]:
        """Return those that take one more prompt, which is in lane `lane_of(worker)` of each.

        The others are awaited from now on.
        """
        limit_s = self._settings.max_prefill_queue_s
        chosen = []
        for worker in workers:
            # Most have so little to do that no lane can be full.
            if worker.prefill.load <= limit_s * worker.prefill_tokens_per_s:
                chosen.append(worker)
                continue
            lane = lane_of(worker)
            if self._is_free(worker, lane):
                chosen.append(worker)
            else:
                worker.awaited_lanes.add(lane)
        return chosen

    def is_awaited_no_more(self, worker: WorkerState) -> bool:
        """Whether somebody was refused for a lane of it that is free now."""
        if not worker.awaited_lanes:
            return False
        freed = {lane for lane in worker.awaited_lanes if self._is_free(worker, lane)}
        worker.awaited_lanes -= freed
        return bool(freed)

    def check_can_ever_fit(self, request: RouteRequest) -> None:
        """Raise InvalidRequest when the request is longer than every worker's limits."""
        if not self._workers:
            return
        prompt, total = request.num_prompt_tokens, request.num_prompt_tokens + request.max_tokens
        longest = max(one.info.max_model_len for one in self._workers.values())
        largest = max(one.num_blocks for one in self._workers.values())
        param = "prompt" if prompt >= longest else "max_tokens"
        size = f"this request needs {total} tokens ({prompt} prompt, {total - prompt} output)"
        if total > longest:
            raise InvalidRequest(
                f"{size}; the longest that any worker takes is {longest}",
                param=param,
                code="context_length_exceeded",
            )
        needed = self._blocks_needed(request)
        if needed > largest:
            raise InvalidRequest(
                f"{size}, which is {needed} KV blocks of {self.block_size}; the most that any "
                f"worker has is {largest}",
                param=param,
                code="context_length_exceeded",
            )

    def prefill_drain_s(self, queued_tokens: int) -> float:
        """Seconds until the workers have computed what they have and `queued_tokens`."""
        workers = self._prefillers or self._decoders
        rate = sum(one.prefill_tokens_per_s for one in workers)
        tokens = queued_tokens + sum(one.prefill.load for one in workers)
        return tokens / rate if rate else 0.0

    def _is_free(self, worker: WorkerState, lane: Lane) -> bool:
        limit = self._settings.max_prefill_queue_s * worker.prefill_tokens_per_s
        return worker.queued_tokens(lane) <= limit

    def _prior_rate(self) -> float:
        rates = [self._workers[name].prefill_tokens_per_s for name in self._measured]
        return sum(rates) / len(rates) if rates else self._settings.prior_prefill_tokens_per_s

    def _blocks_needed(self, request: RouteRequest) -> int:
        # The last token drawn is never computed, so it needs no room.
        prompt = request.num_prompt_tokens
        return -(-max(prompt, prompt + request.max_tokens - 1) // self.block_size)

    def _fits(self, request: RouteRequest, max_model_len: int, num_blocks: int) -> bool:
        total = request.num_prompt_tokens + request.max_tokens
        return total <= max_model_len and self._blocks_needed(request) <= num_blocks

    def _fits_on(self, request: RouteRequest, worker: WorkerState) -> bool:
        return self._fits(request, worker.info.max_model_len, worker.num_blocks)

    def _sort(self) -> None:
        every = self._workers.values()
        self._shortest = min((one.info.max_model_len for one in every), default=0)
        self._smallest = min((one.num_blocks for one in every), default=0)
        usable = [one for one in self._workers.values() if not one.draining]
        self._decoders = [one for one in usable if one.role != "prefill"]
        self._prefillers = [one for one in usable if one.role != "decode"]
        self._only_prefillers = [one for one in usable if one.role == "prefill"]
