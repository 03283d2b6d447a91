"""CPU time and memory of the two processes of `twinfire serve` under streaming load.

Prints, per concurrent stream count, the gateway's and the worker's CPU microseconds for each
output token, and at the end each process's resident memory. Arguments after `--` go to
`twinfire serve`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from quick import START_TIMEOUT_S, free_port
from twinfire.bench.client import Client
from twinfire.bench.load_run import RunOptions, build_workload, new_seed, run_built, warm_up
from twinfire.bench.machine import describe_machine
from twinfire.bench.parameters import Concurrent
from twinfire.bench.process_tree import Process, scan_processes, tree_of
from twinfire.bench.server_process import ServerProcess, run_until_signal
from twinfire.bench.target import Target

STREAMS = (1, 4, 16)
TOKENS = 128


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("serve_args", nargs="*", metavar="SERVE_ARG")
    run_until_signal(measure(Console(), parser.parse_args().serve_args))
    return 0


async def measure(console: Console, serve_args: list[str]) -> None:
    port = free_port()
    command = [sys.executable, "-m", "twinfire.cli.main", "serve", "--port", str(port), *serve_args]
    machine = describe_machine()
    console.print(f"{machine.cpu}, {machine.cores} cores, load {machine.load_average_1m}")
    table = Table("streams", "tokens/s", "gateway µs/token", "worker µs/token")
    with tempfile.TemporaryDirectory(prefix="twinfire-bench-") as folder:
        url = f"http://127.0.0.1:{port}"
        async with ServerProcess(command, url, Path(folder) / "server.log") as server:
            await server.wait_until_ready(server.started_s + START_TIMEOUT_S)
            for streams in STREAMS:
                table.add_row(str(streams), *await _one_row(server.pid, url, streams))
            console.print(table)
            for name, process in zip(
                ("gateway", "worker"), _gateway_and_worker(server.pid), strict=True
            ):
                console.print(f"{name}: {process.rss_bytes / 2**20:.0f} MiB resident")


async def _one_row(root: int, url: str, streams: int) -> tuple[str, str, str]:
    scenario = Concurrent("streams", streams * 3, streams, 64, TOKENS)
    options = RunOptions(seed=new_seed())
    async with Client(Target(url)) as client:
        built = await build_workload(client, scenario, options)
        await warm_up(client, options)
        before, started_s = _gateway_and_worker(root), time.monotonic()
        await run_built(client, scenario, built, options, lambda _: None)
        after, elapsed_s = _gateway_and_worker(root), time.monotonic() - started_s
    tokens = streams * 3 * TOKENS
    gateway_s, worker_s = (b.cpu_s - a.cpu_s for a, b in zip(before, after, strict=True))
    return (
        f"{tokens / elapsed_s:.0f}",
        f"{gateway_s / tokens * 1e6:.0f}",
        f"{worker_s / tokens * 1e6:.0f}",
    )


def _gateway_and_worker(root: int) -> list[Process]:
    processes = sorted(tree_of(root, scan_processes()), key=lambda process: process.pid)
    assert len(processes) == 2, "a gateway and a worker"
    return processes


if __name__ == "__main__":
    sys.exit(main())
