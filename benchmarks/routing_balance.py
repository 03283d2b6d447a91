"""How evenly, and how near to the caches, policies place the requests of real traces.

The real router and admission queue, driven in virtual time over simulated workers; round robin,
least requests, prefix aware and ours on the same arrivals. Whole traces, scaled to a load: memory
holds a number of mean streams, arrivals fill it to the load, and prefill workers are as fast as
makes what one cache of all their memory would leave to compute the same load of theirs.

    python benchmarks/routing_balance.py TRACE... [--shape 2x2] [--out benchmarks/results/x.md]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from routing_plan import Plan, Shape, cacheable_units, fit, sessions_of
from simulated_cache import BLOCK_TOKENS, UNIT_TOKENS, Lease, unit_hashes
from simulated_worker import PromptJob, SimulatedWorker, Stream
from twinfire.bench.trace import TraceRequest, read_trace
from twinfire.bench.virtual_time import run_virtual
from twinfire.gateway.routing.admission import AdmissionQueue
from twinfire.gateway.routing.costs import CostModel
from twinfire.gateway.routing.policies import (
    Balanced,
    LeastRequests,
    Policy,
    PrefixAware,
    RoundRobin,
)
from twinfire.gateway.routing.route import Route, RouteRequest
from twinfire.gateway.routing.router import Router
from twinfire.gateway.routing.routing_settings import RoutingSettings

MakePolicy = Callable[[CostModel, RoutingSettings], Policy]
POLICIES: dict[str, MakePolicy] = {
    "round robin": lambda costs, settings: RoundRobin(),
    "least requests": lambda costs, settings: LeastRequests(),
    "prefix aware": lambda costs, settings: PrefixAware(),
    "ours": Balanced,
}
SAMPLE_S = 0.25
WINDOW_S = 20.0


@dataclass(slots=True)
class Seen:
    """What happened in one run."""

    ttft_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    oracle_tokens: int = 0
    """Cached ones if each request had gone where, at its arrival, most of its prefix was."""
    samples: list[tuple[list[int], list[int], list[int]]] = field(default_factory=list)
    """(prompt tokens waiting, prompt tokens computed so far, KV blocks used) by worker."""


class Simulation:
    def __init__(
        self, plan: Plan, shape: Shape, policy: MakePolicy, changes: dict[str, float]
    ) -> None:
        loop, speeds = asyncio.get_running_loop(), plan.speeds
        settings = RoutingSettings(
            prior_prefill_tokens_per_s=speeds.prefill_tokens_per_s,
            prior_transfer_bytes_per_s=speeds.transfer_bytes_per_s,
            max_queued_requests=1 << 30,
            max_queued_tokens=1 << 60,
            **changes,
        )
        self.plan = plan
        self.speeds = speeds
        self.router = Router(loop.time, settings, policy)
        self.queue = AdmissionQueue(self.router, loop.time)
        self.seen = Seen()
        self.prefill = [
            SimulatedWorker(f"p{number}", "prefill", plan.num_blocks, speeds, self.router)
            for number in range(shape.num_prefill)
        ]
        self.decode = [
            SimulatedWorker(f"d{number}", "decode", plan.num_blocks, speeds, self.router)
            for number in range(shape.num_decode)
        ]
        self.workers = {worker.name: worker for worker in self.prefill + self.decode}
        self._hashes: dict[int, list[bytes]] = {}
        self._loop = loop

    async def run(self, sessions: Sequence[str | None]) -> None:
        sampler = asyncio.ensure_future(self._sample())
        tasks = []
        for number, request in enumerate(self.plan.requests):
            at_s = request.arrival_s * self.plan.time_scale
            await asyncio.sleep(max(at_s - self._loop.time(), 0))
            tasks.append(asyncio.ensure_future(self._one(number, request, sessions[number])))
        # What follows the last arrival is emptying, not load.
        sampler.cancel()
        await asyncio.gather(*tasks)

    async def _one(self, number: int, request: TraceRequest, session: str | None) -> None:
        arrived_s = self._loop.time()
        units = cacheable_units(request)
        self.seen.prompt_tokens += request.input_tokens
        best = max(worker.cache.num_hit_units(units) for worker in self.workers.values())
        self.seen.oracle_tokens += best * UNIT_TOKENS
        asked = RouteRequest(
            num_prompt_tokens=request.input_tokens,
            block_hashes=self._block_hashes(units),
            max_tokens=request.output_tokens,
            affinity=session,
            request_id=number + 1,
        )
        route = await self.queue.enter(asked, None)
        decode = self.workers[route.decode]
        if route.prefill is None:
            lease = await self._alone(decode, request, units, route, number)
        else:
            lease = await self._handed_over(request, units, route, number)
        route.charge.decode_started()
        route.charge.decode_tokens(1)
        self.seen.ttft_s.append(self._loop.time() - arrived_s)
        if request.output_tokens == 1:
            route.charge.release()
            decode.free(lease)
            return
        done = self._loop.create_future()
        num_tokens = request.input_tokens + 1
        decode.decode(Stream(num_tokens, request.output_tokens - 1, lease, route.charge, done))
        await done

    async def _alone(
        self,
        worker: SimulatedWorker,
        request: TraceRequest,
        units: Sequence[int],
        route: Route,
        n: int,
    ) -> Lease:
        lease = await worker.lease(units, request.input_tokens)
        job = await self._job(worker, lease, request, units, route, n)
        worker.compute(job)
        await job.done
        self._count_cached(route, job.num_cached)
        return lease

    async def _handed_over(
        self, request: TraceRequest, units: Sequence[int], route: Route, number: int
    ) -> Lease:
        assert route.prefill is not None
        prefill, decode = self.workers[route.prefill], self.workers[route.decode]
        reserved: list[Lease] = []

        def reserve() -> bool:
            num_blocks = -(-request.input_tokens // BLOCK_TOKENS)
            found = decode.cache.acquire(units, num_blocks)
            if found is None:
                self._loop.call_later(0.05, prefill.wake)
                return False
            reserved.append(found)
            route.charge.decode_reserved()
            return True

        lease = await prefill.lease(units, request.input_tokens)
        job = await self._job(prefill, lease, request, units, route, number)
        job.may_start = reserve
        prefill.compute(job)
        started_s = self._loop.time()
        await job.done
        taken = reserved[0]
        missing = request.input_tokens - len(taken.units) * UNIT_TOKENS
        # Earlier chunks moved while later ones were computed.
        total_s = self.speeds.transfer_s(missing) - (self._loop.time() - started_s)
        await asyncio.sleep(max(total_s, self.speeds.transfer_s(min(missing, 2048))))
        prefill.free(lease)
        for unit in units[len(taken.units) :]:
            decode.cache.register(taken, unit)
        self._count_cached(route, job.num_cached)
        return taken

    async def _job(
        self,
        worker: SimulatedWorker,
        lease: Lease,
        request: TraceRequest,
        units: Sequence[int],
        route: Route,
        number: int,
    ) -> PromptJob:
        if route.pull is not None:
            holder = self.workers[route.pull.holder]
            hint = route.pull.num_blocks * BLOCK_TOKENS // UNIT_TOKENS
            pulled = units[len(lease.units) : min(holder.cache.num_hit_units(units), hint)]
            await asyncio.sleep(self.speeds.transfer_s(len(pulled) * UNIT_TOKENS))
            for unit in pulled:
                worker.cache.register(lease, unit)
        num_cached = len(lease.units) * UNIT_TOKENS
        return PromptJob(
            request_id=number + 1,
            units=units,
            num_tokens=request.input_tokens,
            num_computed=num_cached,
            lease=lease,
            charge=route.charge,
            done=self._loop.create_future(),
            num_cached=num_cached,
        )

    def _count_cached(self, route: Route, num_cached: int) -> None:
        route.charge.prefill_done(num_cached)
        self.seen.cached_tokens += num_cached

    def _block_hashes(self, units: Sequence[int]) -> list[bytes]:
        hashes: list[bytes] = []
        for unit in units:
            if unit not in self._hashes:
                self._hashes[unit] = unit_hashes(unit)
            hashes += self._hashes[unit]
        return hashes

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            self.seen.samples.append(
                (
                    [worker.num_waiting_tokens for worker in self.prefill],
                    [worker.worked.prompt_tokens for worker in self.prefill],
                    [worker.cache.num_used_blocks for worker in self.decode],
                )
            )


def imbalance(values: np.ndarray) -> float:
    """Mean over time of the most loaded worker's share, against an even one. [time, worker]"""
    return float(values.max(axis=1).sum() / max(values.mean(axis=1).sum(), 1e-9))


def row(name: str, simulation: Simulation, real_s: float) -> str:
    seen = simulation.seen
    waiting, computed, used = (np.array(part) for part in zip(*seen.samples, strict=True))
    # Traces that are over sooner get windows of a tenth of their time.
    width = max(min(round(WINDOW_S / SAMPLE_S), len(used) // 10), 1)
    per_window = np.diff(computed[::width], axis=0)
    num_windows = len(used) // width
    used_windows = used[: num_windows * width].reshape(num_windows, width, -1).mean(axis=1)
    gaps_ms = np.concatenate([one.worked.gaps_s for one in simulation.decode]) * 1e3
    ttft_s = np.array(seen.ttft_s)
    total = seen.prompt_tokens
    tallies = simulation.router.tallies
    handed_over = tallies.reasons["cheaper"] / max(sum(tallies.reasons.values()), 1)
    cells = [
        name,
        f"{imbalance(per_window):.2f}",
        f"{imbalance(used_windows):.2f}",
        f"{imbalance(waiting):.2f}",
        f"{imbalance(used):.2f}",
        f"{100 * seen.cached_tokens / total:.1f}",
        f"{100 * seen.oracle_tokens / total:.1f}",
        *(f"{np.percentile(ttft_s, percent):.2f}" for percent in (50, 90, 99)),
        *(f"{np.percentile(gaps_ms, percent):.0f}" for percent in (50, 99)),
        f"{100 * handed_over:.0f}",
        f"{real_s:.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


HEADER = [
    "| policy | P work | D KV, 20 s | P queue now | D KV now | cached % | oracle % | TTFT P50 s "
    "| P90 | P99 | ITL P50 ms | P99 | handed over % | run s |",
    "|" + "---|" * 14,
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--shape", nargs="+", type=Shape.parse, default=[Shape(2, 2), Shape(8, 16)])
    parser.add_argument("--policy", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--sessions", action="store_true", help="name the sessions of the trace")
    parser.add_argument("--max-requests", type=int)
    parser.add_argument("--set", nargs="+", default=[], help="NAME=NUMBER of RoutingSettings")
    parser.add_argument("--out", type=Path, help="append the tables to this file")
    args = parser.parse_args()
    changes = {name: float(value) for name, _, value in (one.partition("=") for one in args.set)}
    for trace in args.traces:
        requests = read_trace(trace)[: args.max_requests]
        names = sessions_of(requests) if args.sessions else [None] * len(requests)
        for shape in args.shape:
            plan = fit(requests, shape)
            lines = [
                f"## {trace.stem}, {shape}" + (", sessions named" if args.sessions else ""),
                "",
                f"{len(requests):,} requests, arrival times x {plan.time_scale:.3g}; "
                f"{plan.num_blocks:,} KV blocks and {plan.speeds.prefill_tokens_per_s:,.0f} prompt "
                f"tokens/s on each worker. An endless cache would hold "
                f"{100 * plan.endless_share:.1f} % of the prompt tokens, one with the memory "
                f"of all prefill workers {100 * plan.pooled_share:.1f} %.",
                "",
                *HEADER,
            ]
            for name in args.policy:
                lines.append(run(name, plan, shape, names, changes))
            text = "\n".join(lines) + "\n"
            print(text, flush=True)
            if args.out is not None:
                with args.out.open("a") as file:
                    file.write("\n" + text)


def run(
    name: str, plan: Plan, shape: Shape, sessions: Sequence[str | None], changes: dict[str, float]
) -> str:
    async def simulate() -> Simulation:
        simulation = Simulation(plan, shape, POLICIES[name], changes)
        await simulation.run(sessions)
        return simulation

    gc.disable()
    started_s = time.perf_counter()
    simulation = run_virtual(simulate())
    for worker in simulation.router.workers():
        assert (worker.prefill.charged, worker.decode.charged) == (0, 0), "charges are left"
    line = row(name, simulation, time.perf_counter() - started_s)
    gc.enable()
    gc.collect()
    return line


if __name__ == "__main__":
    main()
