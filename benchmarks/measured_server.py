"""One server alone on a calm machine: what any comparison of servers needs around its runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from comparison import ServerUnderTest
from twinfire.bench.client import Client
from twinfire.bench.machine import ForeignCpu, usable_cores
from twinfire.bench.process_tree import scan_processes, tree_of
from twinfire.bench.server_process import ServerProcess, run_until_signal, url_of_command
from twinfire.bench.target import Target
from twinfire.protocol.errors import TwinfireError

R = TypeVar("R")
CALM_LOOK_S = 3.0


class TooBusy(TwinfireError):
    """Other processes use this machine."""


def run_and_write(
    name: str, measuring: Coroutine[Any, Any, R], markdown: Callable[[R], str], out: Path
) -> int:
    """Measure, show the table, and write it and the report it is of to `out`.md and .json.

    Returns the exit status; a fault is told under the program's `name`.
    """
    try:
        report = run_until_signal(measuring)
    except KeyboardInterrupt:
        return 130
    except TwinfireError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    out.parent.mkdir(parents=True, exist_ok=True)
    content = msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"
    out.with_suffix(".json").write_bytes(content)
    table = markdown(report)
    out.with_suffix(".md").write_text(table)
    print(table)
    print(f"wrote {out}.json and .md")
    return 0


async def check_calm(max_foreign_cpu: float) -> None:
    foreign = ForeignCpu()
    await asyncio.sleep(CALM_LOOK_S)
    if (share := foreign.share()) > max_foreign_cpu:
        raise TooBusy(
            f"other processes take {share:.1%} of the {usable_cores()} cores (load average "
            f"{os.getloadavg()[0]:.2f}); the limit is {max_foreign_cpu:.1%} (--max-foreign-cpu)"
        )


@contextlib.asynccontextmanager
async def started(
    server: ServerUnderTest, start_timeout_s: float
) -> AsyncIterator[tuple[ServerProcess, Client]]:
    with tempfile.TemporaryDirectory(prefix="compare-peers-") as folder:
        log = Path(folder) / f"{server.name}.log"
        command = shlex.split(server.command)
        url = server.url or url_of_command(command)
        target = Target(url=url, model=server.model, extra_body=server.extra_body)
        async with ServerProcess(command, url, log) as process, Client(target) as client:
            deadline_s = process.started_s + start_timeout_s
            await process.wait_until_ready(deadline_s)
            yield process, client


def cpu_s(root: int) -> float:
    return sum(process.cpu_s for process in tree_of(root, scan_processes()))


def note(text: str) -> None:
    print(f"{datetime.now():%H:%M:%S} {text}", file=sys.stderr, flush=True)
