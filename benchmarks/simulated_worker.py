"""A worker in virtual time: chunked prefill at a rate, decode steps by occupancy, KV limits.

Takes steps as the real engine does: every running stream gets a token, then prompt chunks in order
of arrival up to a budget; reports load and cache events after each. Computes no tokens.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from simulated_cache import BLOCK_TOKENS, UNIT_TOKENS, Lease, SimulatedCache
from twinfire.gateway.routing.route_charge import RouteCharge
from twinfire.gateway.routing.router import Router
from twinfire.protocol.messages import Load, Peer, Role, WorkerInfo

STEP_TOKENS = 2048
_MEMORY = 0.9


@dataclass(frozen=True, slots=True)
class Speeds:
    """What a worker can do; all but the first are about an 8B model on a large GPU."""

    prefill_tokens_per_s: float
    step_base_s: ClassVar[float] = 0.012
    step_s_per_block: ClassVar[float] = 1e-6
    kv_bytes_per_block: ClassVar[int] = 4 << 20
    transfer_bytes_per_s: ClassVar[float] = 25e9

    def transfer_s(self, num_tokens: int) -> float:
        return num_tokens / BLOCK_TOKENS * self.kv_bytes_per_block / self.transfer_bytes_per_s


@dataclass(slots=True, eq=False)
class PromptJob:
    """A prompt on the worker that computes it."""

    request_id: int
    units: Sequence[int]
    num_tokens: int
    num_computed: int
    lease: Lease
    charge: RouteCharge
    done: asyncio.Future[None]
    may_start: Callable[[], bool] = lambda: True
    """Takes what else the prompt needs; asked until it returns True."""
    has_started: bool = False
    num_cached: int = 0


@dataclass(slots=True, eq=False)
class Stream:
    """A request that is being decoded."""

    num_tokens: int
    num_left: int
    lease: Lease
    charge: RouteCharge
    done: asyncio.Future[None]


@dataclass(slots=True)
class Step:
    streams: list[Stream]
    chunks: list[tuple[PromptJob, int]]
    started_s: float


@dataclass(slots=True)
class Worked:
    """What a worker has done, for reports."""

    prompt_tokens: int = 0
    gaps_s: array[float] = field(default_factory=lambda: array("d"))
    """Of every streamed token but the first."""


class SimulatedWorker:
    """One worker and its link to the router."""

    def __init__(
        self, name: str, role: Role, num_blocks: int, speeds: Speeds, router: Router
    ) -> None:
        self.name = name
        self.cache = SimulatedCache(num_blocks)
        self.worked = Worked()
        self._speeds = speeds
        self._router = router
        self._loop = asyncio.get_running_loop()
        self._jobs: deque[PromptJob] = deque()
        self._streams: list[Stream] = []
        self._step: Step | None = None
        self._rate = 0.0
        self._decode_step_s = 0.0
        self._num_steps = 0
        self._last_charge = 0
        self._room = asyncio.Event()
        router.worker_joined(self._info(role, num_blocks))

    @property
    def num_waiting_tokens(self) -> int:
        return sum(job.num_tokens - job.num_computed for job in self._jobs)

    async def lease(self, units: Sequence[int], num_tokens: int) -> Lease:
        """Take the blocks of a context, waiting for room."""
        while (found := self.cache.acquire(units, -(-num_tokens // BLOCK_TOKENS))) is None:
            self._room.clear()
            await self._room.wait()
        return found

    def compute(self, job: PromptJob) -> None:
        """Queue a prompt whose blocks are taken."""
        self._last_charge = max(self._last_charge, job.request_id)
        self._jobs.append(job)
        self._begin()

    def decode(self, stream: Stream) -> None:
        """Go on with a request whose context is in place."""
        self._streams.append(stream)
        self._begin()

    def free(self, lease: Lease) -> None:
        self.cache.release(lease)
        self._room.set()
        self._begin()

    def wake(self) -> None:
        """Ask jobs again whether they may start."""
        self._begin()

    def _begin(self) -> None:
        if self._step is not None:
            return
        step = Step(list(self._streams), self._chunks(), self._loop.time())
        if not (step.streams or step.chunks):
            return
        self._step = step
        duration_s = sum(size for _, size in step.chunks) / self._speeds.prefill_tokens_per_s
        if step.streams:
            num_blocks = sum(one.num_tokens for one in step.streams) / BLOCK_TOKENS
            duration_s += self._speeds.step_base_s + self._speeds.step_s_per_block * num_blocks
        self._loop.call_later(duration_s, self._end)

    def _chunks(self) -> list[tuple[PromptJob, int]]:
        left, chunks = STEP_TOKENS, []
        for job in self._jobs:
            if not job.has_started:
                if not job.may_start():
                    continue
                job.has_started = True
            self._skip_what_others_computed(job)
            size = min(left, job.num_tokens - job.num_computed)
            chunks.append((job, size))
            left -= size
            if left <= 0:
                break
        return chunks

    def _skip_what_others_computed(self, job: PromptJob) -> None:
        while True:
            index = len(job.lease.units)
            is_boundary = job.num_computed == index * UNIT_TOKENS
            if not is_boundary or index >= len(job.units) or not self.cache.has(job.units[index]):
                return
            if job.num_computed + UNIT_TOKENS >= job.num_tokens:
                return
            self.cache.register(job.lease, job.units[index])
            job.num_computed += UNIT_TOKENS
            job.num_cached += UNIT_TOKENS

    def _end(self) -> None:
        step, self._step = self._step, None
        assert step is not None
        elapsed_s = self._loop.time() - step.started_s
        self._num_steps += 1
        self._measure(step, elapsed_s)
        for job, size in step.chunks:
            self._computed(job, size)
        for stream in step.streams:
            self._streamed(stream, elapsed_s)
        self._report()
        self._begin()

    def _measure(self, step: Step, elapsed_s: float) -> None:
        tokens = sum(size for _, size in step.chunks)
        if tokens and not step.streams:
            rate = tokens / elapsed_s
            self._rate = self._rate * _MEMORY + rate * (1 - _MEMORY) if self._rate else rate
        elif not tokens:
            known_s = self._decode_step_s or elapsed_s
            self._decode_step_s = known_s * _MEMORY + elapsed_s * (1 - _MEMORY)

    def _computed(self, job: PromptJob, size: int) -> None:
        job.num_computed += size
        self.worked.prompt_tokens += size
        while len(job.lease.units) < min(len(job.units), job.num_computed // UNIT_TOKENS):
            self.cache.register(job.lease, job.units[len(job.lease.units)])
        job.charge.prefill_progress(job.num_computed)
        if job.num_computed >= job.num_tokens:
            self._jobs.remove(job)
            job.done.set_result(None)

    def _streamed(self, stream: Stream, elapsed_s: float) -> None:
        self.worked.gaps_s.append(elapsed_s)
        stream.num_tokens += 1
        stream.num_left -= 1
        if stream.num_tokens % BLOCK_TOKENS == 1:
            self.cache.grow(stream.lease)
        stream.charge.decode_tokens(1)
        if not stream.num_left:
            self._streams.remove(stream)
            stream.charge.release()
            self.cache.release(stream.lease)
            self._room.set()
            stream.done.set_result(None)

    def _report(self) -> None:
        events = self.cache.take_events()
        if events is not None:
            self._router.observe_cache(self.name, events)
        self._router.observe_load(
            self.name,
            Load(
                step=self._num_steps,
                running=len(self._streams) + sum(job.has_started for job in self._jobs),
                waiting=sum(not job.has_started for job in self._jobs),
                kv_blocks_used=self.cache.num_used_blocks,
                kv_blocks_total=self.cache.num_blocks,
                step_tokens=0,
                preemptions=self.cache.num_overflows,
                prefix_queries=0,
                prefix_hits=0,
                prefill_tokens_waiting=self.num_waiting_tokens,
                prefill_tokens_per_s=self._rate,
                decode_step_s=self._decode_step_s,
                last_charge=self._last_charge,
            ),
        )

    def _info(self, role: Role, num_blocks: int) -> WorkerInfo:
        return WorkerInfo(
            instance_id=self.name,
            role=role,
            pid=0,
            model="simulated",
            architecture="none",
            dtype="none",
            vocab_size=1,
            max_model_len=num_blocks * BLOCK_TOKENS,
            block_size=BLOCK_TOKENS,
            num_kv_blocks=num_blocks,
            kv_bytes_per_block=self._speeds.kv_bytes_per_block,
            weight_bytes=0,
            max_num_seqs=256,
            peer=Peer(self.name, "unix:/none"),
            max_num_batched_tokens=STEP_TOKENS,
        )
