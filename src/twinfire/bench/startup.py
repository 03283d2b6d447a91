"""How long a server takes from nothing to its first token, and how much memory it needs.

Times from process start: port (connections accepted), ready (`/health` answers 200), first token
(of a short request sent once ready). Memory is sampled over the whole process tree. The operating
system's page cache is left as found: run once before, or drop it, to choose warm or cold.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import aiohttp
import msgspec

from twinfire.bench.client import Client, ServerUnusable
from twinfire.bench.distribution import median
from twinfire.bench.process_tree import tree_pss_bytes, tree_rss_bytes
from twinfire.bench.prometheus_text import metric_values
from twinfire.bench.request import GenerationRequest, Message
from twinfire.bench.request_record import RequestRecord
from twinfire.bench.server_process import ServerProcess
from twinfire.bench.target import Target

MEMORY_SAMPLE_S = 0.05
STAGE_METRIC = "twinfire:startup_stage_seconds"
FIRST_PROMPT = "Say in one sentence what a cache is."
FIRST_MAX_TOKENS = 8


class StartupRun(msgspec.Struct, frozen=True):
    """One start. Seconds since the process was started; bytes over its process tree."""

    port_s: float
    ready_s: float
    first_token_s: float
    ttft_s: float
    """Of the first request alone."""
    peak_rss_bytes: int
    """Largest sum of resident memory seen; pages shared by two processes count twice."""
    pss_bytes: int | None
    """After the first answer, shared pages counted once; None where it may not be read."""
    stop_s: float
    """From the request to stop until the process was gone."""
    stages: dict[str, float] = {}
    """Seconds of each stage by "process: stage", for servers that tell."""


class StartupReport(msgspec.Struct, frozen=True):
    """Several starts and their medians."""

    command: list[str]
    runs: list[StartupRun]
    median: StartupRun


async def measure_startup(
    command: Sequence[str],
    target: Target,
    *,
    runs: int,
    timeout_s: float,
    on_run: Callable[[StartupRun], None],
) -> StartupReport:
    """Start, measure and stop a server `runs` times.

    ServerFailed when it does not come up within `timeout_s`, ServerUnusable when its first
    answer fails.
    """
    results: list[StartupRun] = []
    with tempfile.TemporaryDirectory(prefix="twinfire-startup-") as folder:
        for _ in range(runs):
            server = ServerProcess(command, target.root, Path(folder) / "server.log")
            results.append(await _one_start(server, target, timeout_s))
            on_run(results[-1])
    return StartupReport(list(command), results, _median_run(results))


async def _one_start(server: ServerProcess, target: Target, timeout_s: float) -> StartupRun:
    async with server:
        memory = PeakMemory(server.pid)
        async with memory:
            deadline_s = server.started_s + timeout_s
            port_s = await server.wait_for_port(deadline_s)
            ready_s = await server.wait_until_ready(deadline_s)
            record = await _first_answer(server, target)
            pss_bytes = tree_pss_bytes(server.pid)
            stages = await _stages(server.url)
        stop_started_s = time.monotonic()
        await server.stop()
        stop_s = time.monotonic() - stop_started_s
    return StartupRun(
        port_s=port_s - server.started_s,
        ready_s=ready_s - server.started_s,
        first_token_s=record.chunk_times_s[0] - server.started_s,
        ttft_s=record.chunk_times_s[0] - record.started_s,
        peak_rss_bytes=memory.peak_bytes,
        pss_bytes=pss_bytes,
        stop_s=stop_s,
        stages=stages,
    )


async def _stages(url: str) -> dict[str, float]:
    """Return what Twinfire tells of its own start; nothing for any other server."""
    try:
        async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
            values = metric_values(await response.text(), STAGE_METRIC, ("process", "stage"))
    except (aiohttp.ClientError, ValueError):
        return {}
    return {f"{process}: {stage}": seconds for (process, stage), seconds in values.items()}


async def _first_answer(server: ServerProcess, target: Target) -> RequestRecord:
    request = GenerationRequest((Message("user", FIRST_PROMPT),), FIRST_MAX_TOKENS, temperature=0.0)
    async with Client(target, clock=time.monotonic) as client:
        record = await client.measure(request)
    if not record.completed or not record.chunk_times_s:
        raise ServerUnusable(
            f"the first request failed ({record.error_kind}): {record.error_message}\n"
            f"{server.tail()}"
        )
    return record


class PeakMemory:
    """Samples the resident memory of a process tree while its context is open."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._task: asyncio.Task[None] | None = None
        self.peak_bytes = 0

    async def __aenter__(self) -> PeakMemory:
        self._task = asyncio.create_task(self._sample())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None, "left before it was entered"
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._look()

    def _look(self) -> None:
        self.peak_bytes = max(self.peak_bytes, tree_rss_bytes(self._root))

    async def _sample(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(MEMORY_SAMPLE_S)


def _median_run(runs: Sequence[StartupRun]) -> StartupRun:
    pss = [float(run.pss_bytes) for run in runs if run.pss_bytes is not None]
    return StartupRun(
        port_s=median([run.port_s for run in runs]),
        ready_s=median([run.ready_s for run in runs]),
        first_token_s=median([run.first_token_s for run in runs]),
        ttft_s=median([run.ttft_s for run in runs]),
        peak_rss_bytes=round(median([float(run.peak_rss_bytes) for run in runs])),
        pss_bytes=round(median(pss)) if pss else None,
        stop_s=median([run.stop_s for run in runs]),
        stages={
            name: median([run.stages[name] for run in runs])
            for name in runs[0].stages
            if all(name in run.stages for run in runs)
        },
    )
