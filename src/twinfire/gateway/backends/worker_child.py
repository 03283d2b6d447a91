"""A worker process as its parent holds it: how it is started, ended, and how soon tried again.

The process ends when its standard input closes, so it cannot outlive its parent however that ends.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence

from twinfire.protocol.worker_config import WorkerConfig, encode_worker_config

RESTART_DELAYS_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
HEALTHY_AFTER_S = 60.0
"""A worker that ran this long before it died starts the delays anew."""


class RestartDelays:
    """Growing delays between the lives of one worker."""

    def __init__(self, delays_s: Sequence[float] = RESTART_DELAYS_S) -> None:
        self._delays_s = delays_s
        self._num_deaths = 0

    def after(self, lived_s: float) -> float:
        """Return how long to wait before the next life, the last having been so long."""
        if lived_s > HEALTHY_AFTER_S:
            self._num_deaths = 0
        delay_s = self._delays_s[min(self._num_deaths, len(self._delays_s) - 1)]
        self._num_deaths += 1
        return delay_s


async def start_worker(config: WorkerConfig) -> asyncio.subprocess.Process:
    """Start a process that ends with this one."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "twinfire.worker",
        encode_worker_config(config),
        stdin=asyncio.subprocess.PIPE,
        env=os.environ.copy(),
    )


async def end_worker(process: asyncio.subprocess.Process, limit_s: float) -> None:
    """Let a worker finish what it runs; after `limit_s` it is killed. Returns once it has ended."""
    if process.returncode is not None:
        return
    assert process.stdin is not None
    process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), limit_s)
    except TimeoutError:
        process.kill()
        await process.wait()
