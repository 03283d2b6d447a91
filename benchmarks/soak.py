"""Mixed load for many minutes against a server that this starts; some clients leave early.

Every answer that was read to its end is checked: a finish reason, usage, and as many token ids
received as the usage says. At the end queues and blocks must be back at zero and memory must not
have grown between the second and the last quarter of the run. KV memory counts as resident only
once it was written, so it is small by default: it fills in the first quarter, and blocks are
fought for. The log (JSON lines: start, samples, end) stays under benchmarks/results/. Arguments
after `--` go to `twinfire serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec

import twinfire
from quick import START_TIMEOUT_S, free_port
from soak_load import Counts, Load
from twinfire.bench.client import Client
from twinfire.bench.distribution import Distribution, distribution, median
from twinfire.bench.load_run import new_seed
from twinfire.bench.machine import Machine, describe_machine
from twinfire.bench.process_tree import scan_processes, tree_of
from twinfire.bench.prometheus_text import metric_sum
from twinfire.bench.request import Api
from twinfire.bench.server_process import ServerProcess, run_until_signal
from twinfire.bench.target import Target
from twinfire.protocol.errors import TwinfireError

RESULTS = Path(__file__).parent / "results"
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
SERVE_ARGS = ("--kv-cache-memory", "512MiB")
IDLE_WITHIN_S = 5.0
IDLE_POLL_S = 0.1


class Start(msgspec.Struct, tag="start", tag_field="event"):
    at: str
    version: str
    command: list[str]
    minutes: float
    lanes: int
    disconnect_share: float
    seed: int
    machine: Machine


class Sample(msgspec.Struct, tag="sample", tag_field="event"):
    at: str
    elapsed_s: float
    rss_bytes: dict[str, int]
    """By process: name and its place among those of that name."""
    gauges: dict[str, float | None]
    answered: int
    disconnected: int
    faulty: int


class End(msgspec.Struct, tag="end", tag_field="event"):
    at: str
    elapsed_s: float
    passed: bool
    why_not: list[str]
    answered: int
    by_kind: dict[str, int]
    disconnected: int
    faults: list[str]
    output_tokens: int
    ttft_ms: Distribution | None
    idle_gauges: dict[str, float | None]
    seconds_until_idle: float | None
    rss_second_quarter_bytes: int
    rss_last_quarter_bytes: int
    exit_status: int


class Soak:
    """One run against one server process."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._counts = Counts()
        self._samples: list[Sample] = []
        self._log = args.log or RESULTS / f"soak-{datetime.now(UTC):%Y-%m-%dT%H%M}.jsonl"
        self._started_s = 0.0

    async def run(self) -> End:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "twinfire.cli.main", "serve", "--port", str(port)]
        command += self._args.serve_args
        with tempfile.TemporaryDirectory(prefix="twinfire-soak-") as folder:
            server = ServerProcess(command, url, Path(folder) / "server.log")
            async with server:
                await server.wait_until_ready(server.started_s + START_TIMEOUT_S)
                self._begin()
                extra = {"return_token_ids": True}
                async with (
                    Client(Target(url, extra_body=extra)) as chat,
                    Client(Target(url, api="completions", extra_body=extra)) as completions,
                ):
                    await self._load({"chat": chat, "completions": completions}, server)
                    idle_s, gauges = await self._wait_for_idle(chat)
                exit_status = await server.stop()
            return self._end(idle_s, gauges, exit_status)

    def _begin(self) -> None:
        self._started_s = time.monotonic()
        self._write(
            Start(
                at=now(),
                version=twinfire.__version__,
                command=["twinfire", "serve", *self._args.serve_args],
                minutes=self._args.minutes,
                lanes=self._args.lanes,
                disconnect_share=self._args.disconnect_share,
                seed=self._args.seed,
                machine=describe_machine(),
            )
        )

    async def _load(self, clients: dict[Api, Client], server: ServerProcess) -> None:
        load = Load(clients, self._counts, self._args.seed, self._args.disconnect_share)
        end_s = self._started_s + self._args.minutes * 60
        async with asyncio.TaskGroup() as group:
            for number in range(self._args.lanes):
                group.create_task(load.lane(number))
            while (left_s := end_s - time.monotonic()) > 0:
                await asyncio.sleep(min(self._args.sample_seconds, left_s))
                self._sample(server, await gauges_of(clients["chat"]))
            load.stopping.set()

    def _sample(self, server: ServerProcess, gauges: dict[str, float | None]) -> None:
        members = sorted(tree_of(server.pid, scan_processes()), key=lambda process: process.pid)
        sample = Sample(
            at=now(),
            elapsed_s=time.monotonic() - self._started_s,
            rss_bytes={f"{p.name} {index}": p.rss_bytes for index, p in enumerate(members)},
            gauges=gauges,
            answered=self._counts.answered,
            disconnected=self._counts.disconnected,
            faulty=self._counts.num_faults,
        )
        self._samples.append(sample)
        self._write(sample)

    async def _wait_for_idle(self, client: Client) -> tuple[float | None, dict[str, float | None]]:
        start_s = time.monotonic()
        while True:
            gauges = await gauges_of(client)
            waited_s = time.monotonic() - start_s
            if all(value == 0 for value in gauges.values()):
                return waited_s, gauges
            if waited_s > IDLE_WITHIN_S:
                return None, gauges
            await asyncio.sleep(IDLE_POLL_S)

    def _end(self, idle_s: float | None, gauges: dict[str, float | None], exit_status: int) -> End:
        counts = self._counts
        early, late = self._quarters()
        growth_mb = (late - early) / 1e6
        why_not = []
        if counts.num_faults:
            why_not.append(f"{counts.num_faults} faulty answers")
        if not counts.answered:
            why_not.append("nothing was answered")
        if idle_s is None:
            why_not.append(f"not idle {IDLE_WITHIN_S:g} s after the last request: {gauges}")
        if growth_mb > self._args.max_growth_mb:
            why_not.append(f"memory grew by {growth_mb:.0f} MB")
        if exit_status != 0:
            why_not.append(f"the server ended with status {exit_status}")
        end = End(
            at=now(),
            elapsed_s=time.monotonic() - self._started_s,
            passed=not why_not,
            why_not=why_not,
            answered=counts.answered,
            by_kind=dict(counts.by_kind),
            disconnected=counts.disconnected,
            faults=counts.faults,
            output_tokens=counts.output_tokens,
            ttft_ms=distribution(counts.ttfts_ms),
            idle_gauges=gauges,
            seconds_until_idle=idle_s,
            rss_second_quarter_bytes=early,
            rss_last_quarter_bytes=late,
            exit_status=exit_status,
        )
        self._write(end)
        print(f"log: {self._log}")
        return end

    def _quarters(self) -> tuple[int, int]:
        """Return the median memory of the second and the last quarter of the run."""
        totals = [float(sum(sample.rss_bytes.values())) for sample in self._samples]
        quarter = max(len(totals) // 4, 1)
        early = totals[quarter : 2 * quarter] or totals
        return round(median(early)), round(median(totals[-quarter:]))

    def _write(self, line: Start | Sample | End) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            log.write(msgspec.json.encode(line) + b"\n")
        print(msgspec.json.encode(line).decode()[:400], file=sys.stderr, flush=True)


async def gauges_of(client: Client) -> dict[str, float | None]:
    page = await client.get(client.target.root + "/metrics")
    text = "" if page is None else page.decode()
    return {name: metric_sum(text, f"twinfire:{name}") for name in GAUGES}


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--lanes", type=int, default=12, help="requests at any time (default: 12)")
    parser.add_argument("--disconnect-share", type=float, default=0.1, metavar="SHARE")
    parser.add_argument("--sample-seconds", type=float, default=10.0)
    parser.add_argument("--max-growth-mb", type=float, default=64.0)
    parser.add_argument("--seed", type=int, default=new_seed())
    parser.add_argument("--log", type=Path, help="else by date in results/")
    parser.add_argument("serve_args", nargs="*", metavar="SERVE_ARG", default=SERVE_ARGS)
    try:
        end = run_until_signal(Soak(parser.parse_args()).run())
    except KeyboardInterrupt:
        return 130
    except TwinfireError as error:
        print(f"soak: {error}", file=sys.stderr)
        return 1
    print("passed" if end.passed else f"failed: {'; '.join(end.why_not)}")
    return 0 if end.passed else 1


if __name__ == "__main__":
    sys.exit(main())
