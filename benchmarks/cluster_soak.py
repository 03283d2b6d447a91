"""Thousands of mixed requests against `twinfire up` whose workers are killed at random.

Every answer must be the one that `twinfire serve` gave to the same request before: token ids, text,
finish reasons and usage. Some clients leave early. At the end nothing may be held or charged
anywhere and the gateway must not have grown. The model is the tests' tiny random one. The log (JSON
lines: start with the command, samples, end) stays under benchmarks/results/.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import shlex
import signal
import sys
import tempfile
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import twinfire
from cluster_soak_pool import reference_answers, request_pool
from quick import START_TIMEOUT_S, free_port
from support.completion_client import Answer, client_session, complete
from support.tiny_text_model import write_text_model
from twinfire.bench.load_run import new_seed
from twinfire.bench.machine import Machine, describe_machine
from twinfire.bench.process_tree import pss_bytes
from twinfire.bench.server_process import ServerProcess, run_until_signal

RESULTS = Path(__file__).parent / "results"
NUM_WORKERS = 4
REQUEST_LIMIT_S = 60.0
IDLE_WITHIN_S = 5.0
MAX_FAULTS_KEPT = 30
CLUSTER = """
[gateway]
port = {port}
pd_policy = "{policy}"
[model]
model = "{model}"
connector = "{connector}"
prefill = {{ count = 2, threads = 1, kv_cache_memory = {kv_bytes} }}
decode = {{ count = 2, threads = 1, kv_cache_memory = {kv_bytes} }}
"""
HELD = re.compile(
    r"^twinfire:(worker_kv_blocks_used|worker_kv_blocks_held|worker_hand_offs_open"
    r"|worker_requests_running|worker_requests_waiting|ledger_prefill_tokens|ledger_kv_blocks"
    r"|gateway_queue_requests)({[^}]*}) (\S+)$",
    re.MULTILINE,
)
"""What must be 0 when nobody asks for anything."""


class Start(msgspec.Struct, tag="start", tag_field="event"):
    at: str
    command: str
    version: str
    num_requests: int
    seed: int
    machine: Machine


class Sample(msgspec.Struct, tag="sample", tag_field="event"):
    at: str
    elapsed_s: float
    answered: int
    cancelled: int
    faulty: int
    kills: int
    gateway_bytes: int | None


class End(msgspec.Struct, tag="end", tag_field="event"):
    at: str
    elapsed_s: float
    passed: bool
    why_not: list[str]
    answered: int
    equal: int
    cancelled: int
    faults: list[str]
    kills: dict[str, int]
    output_tokens: int
    slowest_answer_s: float
    seconds_until_idle: float | None
    held_at_the_end: dict[str, float]
    gateway_bytes_first_quarter: int
    gateway_bytes_end: int
    attempts: dict[str, float]
    exit_status: int


class ClusterSoak:
    """One run."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._choose = random.Random(args.seed)
        self._pool = request_pool(args.pool, args.seed)
        self._expected: list[Answer] = []
        self._num_sent = 0
        self._equal = self._answered = self._cancelled = self._num_faulty = 0
        self._output_tokens = 0
        self._slowest_s = 0.0
        self._faults: list[str] = []
        self._kills: Counter[str] = Counter()
        self._sizes: list[int] = []
        self._started_s = time.monotonic()

    async def run(self) -> End:
        self._args.log.unlink(missing_ok=True)
        self._write(
            Start(
                now(),
                shlex.join(["python", "benchmarks/cluster_soak.py", *sys.argv[1:]]),
                twinfire.__version__,
                self._args.requests,
                self._args.seed,
                describe_machine(),
            )
        )
        with tempfile.TemporaryDirectory(prefix="twinfire-soak-") as name:
            folder = Path(name)
            write_text_model(folder / "tiny")
            async with client_session(REQUEST_LIMIT_S) as session:
                await self._learn(session, folder)
                return await self._soak(session, folder)

    async def _learn(self, session: aiohttp.ClientSession, folder: Path) -> None:
        port = free_port()
        words = ["serve", str(folder / "tiny"), "--port", str(port), "--threads", "1"]
        command = [sys.executable, "-m", "twinfire.cli.main", *words, "--no-weight-cache"]
        command += ["--kv-cache-memory", "16MiB"]
        server = ServerProcess(command, f"http://127.0.0.1:{port}", folder / "serve.log")
        async with server:
            await server.wait_until_ready(server.started_s + START_TIMEOUT_S)
            self._expected = await reference_answers(session, server.url, self._pool)

    async def _soak(self, session: aiohttp.ClientSession, folder: Path) -> End:
        args, port = self._args, free_port()
        file = folder / "cluster.toml"
        file.write_text(
            CLUSTER.format(
                port=port,
                policy=args.pd_policy,
                model=folder / "tiny",
                connector=args.connector,
                kv_bytes=args.kv_bytes,
            )
        )
        command = [sys.executable, "-m", "twinfire.cli.main", "up", str(file)]
        log = args.log.with_suffix(".server.log") if args.keep_server_log else folder / "up.log"
        cluster = ServerProcess(command, f"http://127.0.0.1:{port}", log)
        async with cluster:
            await cluster.wait_until_ready(cluster.started_s + START_TIMEOUT_S)
            await until_all_are_back(session, cluster.url)
            beside = [
                asyncio.create_task(self._kill(session, cluster.url)),
                asyncio.create_task(self._watch(cluster)),
            ]
            await asyncio.gather(*(self._lane(session, cluster.url) for _ in range(args.lanes)))
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            await until_all_are_back(session, cluster.url)
            idle_s, held = await wait_for_idle(session, cluster.url)
            size = pss_bytes(cluster.pid) or 0
            attempts = await counters(session, cluster.url)
            exit_status = await cluster.stop()
        return self._end(idle_s, held, size, attempts, exit_status)

    async def _lane(self, session: aiohttp.ClientSession, url: str) -> None:
        while self._num_sent < self._args.requests:
            self._num_sent += 1
            index = self._choose.randrange(len(self._pool))
            body = self._pool[index]
            headers = {}
            if self._choose.random() < 0.3:
                headers["x-session-affinity"] = f"session-{self._choose.randrange(10)}"
            if self._choose.random() < self._args.cancel_share:
                await self._leave(session, url, body)
                continue
            sent_s = time.monotonic()
            answer = await complete(session, url, body, headers=headers)
            self._slowest_s = max(self._slowest_s, time.monotonic() - sent_s)
            self._check(index, answer)

    def _check(self, index: int, answer: Answer) -> None:
        self._answered += 1
        self._output_tokens += answer.completion_tokens or 0
        difference = answer.difference(self._expected[index])
        if difference is None:
            self._equal += 1
            return
        self._num_faulty += 1
        if len(self._faults) < MAX_FAULTS_KEPT:
            self._faults.append(f"{now()} request {index}: {difference[:500]}")

    async def _leave(self, session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> None:
        """Send a request and go away: before an answer begins or after some of its stream."""
        self._cancelled += 1
        if self._choose.random() < 0.5:
            limit = self._choose.randint(1, 12)
            await complete(session, url, {**body, "stream": True}, leave_after_texts=limit)
            return
        task = asyncio.create_task(complete(session, url, body))
        await asyncio.wait([task], timeout=self._choose.uniform(0.0, 0.1))
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def _kill(self, session: aiohttp.ClientSession, url: str) -> None:
        """Kill one worker at a time, each once all are there again."""
        while True:
            await asyncio.sleep(self._choose.uniform(0.5, 2.0) * self._args.seconds_between_kills)
            workers = await until_all_are_back(session, url)
            victim = self._choose.choice(workers)
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim["pid"], signal.SIGKILL)
                self._kills[victim["name"]] += 1

    async def _watch(self, cluster: ServerProcess) -> None:
        while True:
            size = pss_bytes(cluster.pid)
            self._sizes.append(size or 0)
            self._write(
                Sample(
                    now(),
                    time.monotonic() - self._started_s,
                    self._answered,
                    self._cancelled,
                    self._num_faulty,
                    self._kills.total(),
                    size,
                )
            )
            await asyncio.sleep(self._args.sample_seconds)

    def _end(
        self,
        idle_s: float | None,
        held: dict[str, float],
        size: int,
        attempts: dict[str, float],
        exit_status: int,
    ) -> End:
        early = self._sizes[len(self._sizes) // 4] if self._sizes else 0
        growth_mb = (size - early) / 1e6
        why_not = []
        if self._num_faulty:
            why_not.append(f"{self._num_faulty} answers differ")
        if idle_s is None:
            why_not.append(f"something is held {IDLE_WITHIN_S:g} s after the last request")
        if growth_mb > self._args.max_growth_mb:
            why_not.append(f"the gateway grew by {growth_mb:.0f} MB")
        if not self._kills:
            why_not.append("no worker was killed")
        if self._args.pd_policy == "always" and not attempts.get("hand_offs"):
            why_not.append("no prompt changed workers")
        if exit_status != 0:
            why_not.append(f"the cluster ended with status {exit_status}")
        end = End(
            at=now(),
            elapsed_s=time.monotonic() - self._started_s,
            passed=not why_not,
            why_not=why_not,
            answered=self._answered,
            equal=self._equal,
            cancelled=self._cancelled,
            faults=self._faults,
            kills=dict(self._kills),
            output_tokens=self._output_tokens,
            slowest_answer_s=self._slowest_s,
            seconds_until_idle=idle_s,
            held_at_the_end=held,
            gateway_bytes_first_quarter=early,
            gateway_bytes_end=size,
            attempts=attempts,
            exit_status=exit_status,
        )
        self._write(end)
        return end

    def _write(self, line: Start | Sample | End) -> None:
        self._args.log.parent.mkdir(parents=True, exist_ok=True)
        with self._args.log.open("ab") as log:
            log.write(msgspec.json.encode(line) + b"\n")


async def until_all_are_back(session: aiohttp.ClientSession, url: str) -> list[dict[str, Any]]:
    """Return the workers once every one is there."""
    while True:
        async with session.get(f"{url}/cluster/status") as response:
            workers: list[dict[str, Any]] = json.loads(await response.read())["workers"]
        if len(workers) == NUM_WORKERS:
            return workers
        await asyncio.sleep(0.1)


async def wait_for_idle(
    session: aiohttp.ClientSession, url: str
) -> tuple[float | None, dict[str, float]]:
    """Return how long it took until nothing was held, None if too long, and what is held then."""
    started_s = time.monotonic()
    while True:
        text = await metrics_text(session, url)
        held = {name + labels: float(v) for name, labels, v in HELD.findall(text) if float(v)}
        waited_s = time.monotonic() - started_s
        if not held:
            return waited_s, held
        if waited_s > IDLE_WITHIN_S:
            return None, held
        await asyncio.sleep(0.1)


async def counters(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Return what the gateway counted of tries, failures, resumes and hand-offs."""
    found = re.findall(
        r"^twinfire:(request_attempts|request_attempt_failures|request_resumes|hand_offs"
        r'|preempted_hand_overs|pulled_tokens)_total{[^}]*?(?:reason="([^"]*)")?} (\S+)$',
        await metrics_text(session, url),
        re.MULTILINE,
    )
    return {f"{name}.{reason}".rstrip("."): float(value) for name, reason, value in found}


async def metrics_text(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(f"{url}/metrics") as response:
        return await response.text()


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--pool", type=int, default=200, help="distinct requests (default: 200)")
    parser.add_argument("--lanes", type=int, default=8, help="requests at any time (default: 8)")
    parser.add_argument("--cancel-share", type=float, default=0.1, metavar="SHARE")
    parser.add_argument("--seconds-between-kills", type=float, default=15.0)
    parser.add_argument("--sample-seconds", type=float, default=15.0)
    parser.add_argument("--pd-policy", choices=("auto", "always", "never"), default="always")
    parser.add_argument("--connector", choices=("socket", "nixl"), default="socket")
    parser.add_argument("--kv-bytes", type=int, default=1 << 20, help="of each worker")
    parser.add_argument("--max-growth-mb", type=float, default=32.0)
    parser.add_argument("--seed", type=int, default=new_seed())
    parser.add_argument("--log", type=Path, default=RESULTS / "cluster-soak.log")
    parser.add_argument("--keep-server-log", action="store_true", help="beside the log")
    try:
        end = run_until_signal(ClusterSoak(parser.parse_args()).run())
    except KeyboardInterrupt:
        return 130
    print("passed" if end.passed else f"failed: {'; '.join(end.why_not)}")
    return 0 if end.passed else 1


if __name__ == "__main__":
    sys.exit(main())
