"""CPU time of the processes of `twinfire serve` per streamed token, beside what the machine asks.

For each number of streams, alternating: the server itself, and `floor_server.py`, a second gateway
of the same worker that only wakes up and writes. Each cell is the median of the rounds. The two
processes' resident memory comes last. Arguments after `--` go to `twinfire serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from quick import START_TIMEOUT_S, free_port
from twinfire.bench.client import Client
from twinfire.bench.load_run import RunOptions, build_workload, new_seed, warm_up
from twinfire.bench.machine import describe_machine
from twinfire.bench.parameters import Concurrent
from twinfire.bench.process_tree import Process, scan_processes, tree_of
from twinfire.bench.server_process import ServerProcess, run_until_signal
from twinfire.bench.target import Target
from twinfire.protocol.worker_config import decode_worker_config

INPUT_TOKENS = 64
OUTPUT_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Cost:
    """One run's figures."""

    tokens_per_s: float
    gateway_us: float
    """CPU of the gateway per token; user and system time."""
    wakeups: float
    """Times that the gateway slept, per token."""
    worker_us: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=3, help="runs of each (default: 3)")
    parser.add_argument("serve_args", nargs="*", metavar="SERVE_ARG")
    run_until_signal(measure(Console(), parser.parse_args()))
    return 0


async def measure(console: Console, args: argparse.Namespace) -> None:
    """Print the table."""
    port = free_port()
    command = [sys.executable, "-m", "twinfire.cli.main", "serve", "--port", str(port)]
    machine = describe_machine()
    console.print(f"{machine.cpu}, {machine.cores} cores, load {machine.load_average_1m}")
    with tempfile.TemporaryDirectory(prefix="twinfire-bench-") as folder:
        url = f"http://127.0.0.1:{port}"
        async with ServerProcess(
            [*command, *args.serve_args], url, Path(folder) / "server.log"
        ) as server:
            await server.wait_until_ready(server.started_s + START_TIMEOUT_S)
            gateway, worker = gateway_and_worker(server.pid)
            async with _floor_server(worker.pid) as (floor_pid, floor_url):
                await _compare(
                    console,
                    args,
                    worker.pid,
                    {"twinfire": (gateway.pid, url)} | {"floor": (floor_pid, floor_url)},
                )
            for name, process in zip(
                ("gateway", "worker"), gateway_and_worker(server.pid), strict=True
            ):
                console.print(f"{name}: {process.rss_bytes / 2**20:.0f} MiB resident")


async def _compare(
    console: Console, args: argparse.Namespace, worker_pid: int, servers: dict[str, tuple[int, str]]
) -> None:
    table = Table(
        "streams", "server", "tokens/s", "gateway µs/token", "wake-ups/token", "worker µs/token"
    )
    tokenizing_url = servers["twinfire"][1]
    for streams in args.streams:
        costs: dict[str, list[Cost]] = {name: [] for name in servers}
        for _ in range(args.rounds):
            for name, (pid, url) in servers.items():
                cost = await _one_run(tokenizing_url, url, pid, worker_pid, streams)
                costs[name].append(cost)
        for name, runs in costs.items():
            table.add_row(
                str(streams),
                name,
                f"{median(run.tokens_per_s for run in runs):.0f}",
                f"{median(run.gateway_us for run in runs):.0f}",
                f"{median(run.wakeups for run in runs):.2f}",
                f"{median(run.worker_us for run in runs):.0f}",
            )
    console.print(table)


async def _one_run(
    tokenizing_url: str, url: str, gateway_pid: int, worker_pid: int, streams: int
) -> Cost:
    scenario = Concurrent("streams", streams * 3, streams, INPUT_TOKENS, OUTPUT_TOKENS)
    options = RunOptions(seed=new_seed())
    async with Client(Target(tokenizing_url)) as tokenizing:
        built = await build_workload(tokenizing, scenario, options)
    async with Client(Target(url, model="smollm2-135m")) as client:
        await warm_up(client, options)
        before, started_s = _cost_so_far(gateway_pid, worker_pid), time.monotonic()
        await built.workload.run(client, lambda _: None)
        after, elapsed_s = _cost_so_far(gateway_pid, worker_pid), time.monotonic() - started_s
    tokens = streams * 3 * OUTPUT_TOKENS
    gateway_s, sleeps, worker_s = (b - a for a, b in zip(before, after, strict=True))
    return Cost(
        tokens / elapsed_s, gateway_s / tokens * 1e6, sleeps / tokens, worker_s / tokens * 1e6
    )


def _cost_so_far(gateway_pid: int, worker_pid: int) -> tuple[float, int, float]:
    status = Path(f"/proc/{gateway_pid}/status").read_text()
    sleeps = next(line for line in status.splitlines() if line.startswith("voluntary_ctxt"))
    return _cpu_s(gateway_pid), int(sleeps.split()[1]), _cpu_s(worker_pid)


def _cpu_s(pid: int) -> float:
    """Time on a core, of all threads; to the nanosecond, where /proc/PID/stat counts ticks."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


@asynccontextmanager
async def _floor_server(worker_pid: int) -> AsyncIterator[tuple[int, str]]:
    """Start it; yield its process id and URL."""
    arguments = Path(f"/proc/{worker_pid}/cmdline").read_bytes().split(b"\0")
    config = decode_worker_config(arguments[-2].decode())
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).with_name("floor_server.py")),
        *("--port", str(port), "--worker-socket", config.socket_path),
        *("--input-tokens", str(INPUT_TOKENS), "--output-tokens", str(OUTPUT_TOKENS)),
    )
    try:
        await _until_open(port)
        yield process.pid, f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        await process.wait()


async def _until_open(port: int) -> None:
    async with asyncio.timeout(START_TIMEOUT_S):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                return


def gateway_and_worker(root: int) -> list[Process]:
    """Return the two processes of a server, the gateway first."""
    processes = sorted(tree_of(root, scan_processes()), key=lambda process: process.pid)
    assert len(processes) == 2, "a gateway and a worker"
    return processes


if __name__ == "__main__":
    sys.exit(main())
