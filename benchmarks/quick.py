"""What `make bench` runs: start the server, a few short scenarios, one table. About a minute.

Arguments after `--` go to `twinfire serve`.
"""

from __future__ import annotations

import argparse
import socket
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from twinfire.bench.load_run import RunOptions, new_seed, run_scenario
from twinfire.bench.machine import describe_machine
from twinfire.bench.parameters import (
    Agent,
    Concurrent,
    InterferenceStreams,
    Prefix,
    Scenario,
)
from twinfire.bench.process_tree import tree_rss_bytes
from twinfire.bench.report_table import print_report
from twinfire.bench.server_process import ServerProcess, run_until_signal
from twinfire.bench.target import Target
from twinfire.protocol.errors import TwinfireError

START_TIMEOUT_S = 600.0
SCENARIOS: tuple[Scenario, ...] = (
    Concurrent("single", 3, 1, 128, 64),
    Concurrent("concurrent", 16, 8, 256, 64),
    Concurrent("long", 1, 1, 2000, 8),
    InterferenceStreams(2, 64, 48, 2, 1000, 4, 1.0),
    Prefix(4, 1, 1000, 32, 8),
    Agent(2, 3, 300, 60, 24),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("serve_args", nargs="*", metavar="SERVE_ARG")
    args = parser.parse_args()
    console = Console()
    try:
        failed = run_until_signal(run_all(console, args.serve_args))
    except KeyboardInterrupt:
        return 130
    except TwinfireError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    return 1 if failed else 0


async def run_all(console: Console, serve_args: list[str]) -> int:
    """Return the number of failed requests."""
    port = free_port()
    command = [sys.executable, "-m", "twinfire.cli.main", "serve"]
    command += ["--port", str(port), *serve_args]
    machine = describe_machine()
    load = machine.load_average_1m
    console.print(f"{machine.cpu}, {machine.cores} cores, load average {load}", style="dim")
    failed = 0
    with tempfile.TemporaryDirectory(prefix="twinfire-bench-") as folder:
        url = f"http://127.0.0.1:{port}"
        async with ServerProcess(command, url, Path(folder) / "server.log") as server:
            await server.wait_until_ready(server.started_s + START_TIMEOUT_S)
            ready_s = time.monotonic() - server.started_s
            console.print(f"ready after {ready_s:.2f} s\n")
            for scenario in SCENARIOS:
                report = await run_scenario(
                    Target(url),
                    scenario,
                    RunOptions(seed=new_seed()),
                    lambda stage, total: None,
                    lambda record: None,
                )
                print_report(console, report)
                console.print()
                metrics = [phase.metrics for phase in report.phases]
                failed += sum(m.requests - m.completed for m in metrics)
            rss_mb = tree_rss_bytes(server.pid) / 1e6
            console.print(f"resident memory at the end: {rss_mb:.0f} MB over its processes")
    return failed


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main())
