"""How gateway and compute threads share few cores: priorities, scheduling classes, pinning.

Applies each layout to a running `twinfire serve` from outside and measures 16 streams and one,
in random order, the load client on the same machine. Every run is appended to a file; the table
shows the medians of all runs in it. Arguments after `--` go to `twinfire serve`.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec
from rich.console import Console
from rich.table import Table

from gateway_cost import gateway_and_worker
from quick import START_TIMEOUT_S, free_port
from twinfire.bench.client import Client
from twinfire.bench.load_metrics import LoadMetrics
from twinfire.bench.load_run import RunOptions, build_workload, new_seed, run_built, warm_up
from twinfire.bench.parameters import Concurrent
from twinfire.bench.server_process import ServerProcess, run_until_signal
from twinfire.bench.target import Target

SCENARIOS = (Concurrent("16 streams", 32, 16, 64, 128), Concurrent("one stream", 3, 1, 64, 128))


@dataclass(frozen=True, slots=True)
class Layout:
    """Who yields to whom. What is not said is as the server sets it up."""

    name: str
    gateway_nice: int | None = None
    worker_nice: int | None = None
    worker_batch: bool = False
    gateway_core: int | None = None
    serve_args: tuple[str, ...] = ()


ONE_CORE_LESS = str(max(1, len(os.sched_getaffinity(0)) - 1))
LAYOUTS = (
    Layout("as served"),
    Layout("gateway nice 5", gateway_nice=5),
    Layout("gateway nice 10", gateway_nice=10),
    Layout("worker nice 5", worker_nice=5),
    Layout("worker SCHED_BATCH", worker_batch=True),
    Layout("gateway on core 0", gateway_core=0),
    Layout("a core less to compute", serve_args=("--threads", ONE_CORE_LESS)),
)


class Run(msgspec.Struct, frozen=True):
    """One layout under one scenario, once."""

    layout: str
    scenario: str
    tokens_per_s: float
    ttft_ms: float
    itl_median_ms: float
    itl_p99_ms: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("--runs", type=Path, required=True, help="JSON lines, appended to")
    parser.add_argument("--layout", action="append", help="only these, by name")
    parser.add_argument("serve_args", nargs="*", metavar="SERVE_ARG")
    args = parser.parse_args()
    layouts = [each for each in LAYOUTS if args.layout is None or each.name in args.layout]
    run_until_signal(measure(layouts, args.serve_args, args.runs))
    print_medians(args.runs)
    return 0


async def measure(layouts: Sequence[Layout], serve_args: Sequence[str], runs: Path) -> None:
    """Measure each layout once and append what it gave."""
    async with AsyncExitStack() as stack:
        servers: dict[tuple[str, ...], ServerProcess] = {}
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="twinfire-bench-")))
        for layout in layouts:
            if layout.serve_args not in servers:
                port = free_port()
                command = [sys.executable, "-m", "twinfire.cli.main", "serve", "--port", str(port)]
                command += [*serve_args, *layout.serve_args]
                server = ServerProcess(command, f"http://127.0.0.1:{port}", folder / f"{port}.log")
                servers[layout.serve_args] = await stack.enter_async_context(server)
                await server.wait_until_ready(server.started_s + START_TIMEOUT_S)
        for layout in random.sample(layouts, len(layouts)):
            server = servers[layout.serve_args]
            _apply(layout, server.pid)
            for scenario in SCENARIOS:
                metrics = await _load(server.url, scenario)
                with runs.open("ab") as file:
                    file.write(msgspec.json.encode(_run(layout, scenario, metrics)) + b"\n")


async def _load(url: str, scenario: Concurrent) -> LoadMetrics:
    options = RunOptions(seed=new_seed())
    async with Client(Target(url)) as client:
        built = await build_workload(client, scenario, options)
        await warm_up(client, options)
        report = await run_built(client, scenario, built, options, lambda _: None)
    return report.phases[0].metrics


def _run(layout: Layout, scenario: Concurrent, metrics: LoadMetrics) -> Run:
    assert metrics.completed == metrics.requests, metrics.errors_by_kind
    assert metrics.ttft_ms is not None, "every request had text"
    assert metrics.itl_ms is not None, "and more than one token"
    return Run(
        layout.name,
        scenario.name,
        metrics.output_tokens_per_s,
        metrics.ttft_ms.p50,
        metrics.itl_ms.p50,
        metrics.itl_ms.p99,
    )


def _apply(layout: Layout, server_pid: int) -> None:
    gateway, worker = gateway_and_worker(server_pid)
    every_core = os.sched_getaffinity(0)
    policy = os.SCHED_BATCH if layout.worker_batch else os.SCHED_OTHER
    for thread in _threads(gateway.pid):
        os.setpriority(os.PRIO_PROCESS, thread, layout.gateway_nice or 0)
        core = layout.gateway_core
        os.sched_setaffinity(thread, every_core if core is None else {core})
    for thread in _threads(worker.pid):
        os.setpriority(os.PRIO_PROCESS, thread, layout.worker_nice or 0)
        os.sched_setscheduler(thread, policy, os.sched_param(0))


def _threads(pid: int) -> list[int]:
    return [int(thread.name) for thread in Path(f"/proc/{pid}/task").iterdir()]


def print_medians(runs: Path) -> None:
    """Print a table of all runs in the file."""
    table = Table("scenario", "layout", "runs", "tokens/s", "TTFT ms", "ITL ms", "ITL P99 ms")
    groups: dict[tuple[str, str], list[Run]] = {}
    for line in runs.read_bytes().splitlines():
        run = msgspec.json.decode(line, type=Run)
        groups.setdefault((run.scenario, run.layout), []).append(run)
    for (scenario, layout), members in sorted(groups.items()):
        table.add_row(
            scenario,
            layout,
            str(len(members)),
            f"{median(run.tokens_per_s for run in members):.0f}",
            f"{median(run.ttft_ms for run in members):.0f}",
            f"{median(run.itl_median_ms for run in members):.1f}",
            f"{median(run.itl_p99_ms for run in members):.1f}",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    sys.exit(main())
