"""A place for one worker process: started, started again when it dies, ended when it is told to."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from twinfire.gateway.backends.worker_child import RestartDelays, end_worker, start_worker
from twinfire.protocol.worker_config import WorkerConfig

END_LIMIT_S = 60.0
"""For a drained worker to finish what it runs; then it is killed."""

log = logging.getLogger(__name__)


class WorkerSlot:
    """Belongs to the event loop's thread. `pid` is None while no process runs."""

    def __init__(
        self,
        name: str,
        config: WorkerConfig,
        has_served: Callable[[int], bool],
        delays: RestartDelays | None = None,
    ) -> None:
        """`has_served` tells whether the worker of this process id, dead or not, was ever ready."""
        self.name = name
        self.config = config
        self._has_served = has_served
        self._delays = delays or RestartDelays()
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._ending = False
        self.num_restarts = 0
        self.last_exit: int | None = None
        """Status of the last process that ended, None before one has."""
        self._next_start_s: float | None = None
        self.failure: str | None = None
        """Why it will not be started again: it ended before it was ever ready."""

    @property
    def pid(self) -> int | None:
        """Process id of the worker."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    @property
    def next_start_in_s(self) -> float | None:
        """How long until the worker is started again, None while none is to be."""
        if self._next_start_s is None:
            return None
        return max(0.0, self._next_start_s - asyncio.get_running_loop().time())

    async def start(self) -> None:
        """Start the process and watch it from then on."""
        self._process = await start_worker(self.config)
        self._task = asyncio.create_task(self._watch())

    async def end(self) -> None:
        """Let the worker finish what it runs, then end it; it is not started again."""
        self._ending = True
        if self._process is not None:
            await end_worker(self._process, END_LIMIT_S)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while self._process is not None:
            started_s = loop.time()
            process = self._process
            status = await process.wait()
            self.last_exit = status
            if self._ending:
                return
            if self.num_restarts == 0 and not self._has_served(process.pid):
                self.failure = f"{self.name} exited with status {status} before it was ready"
                log.error("%s", self.failure)
                return
            delay_s = self._delays.after(loop.time() - started_s)
            log.error(
                "%s exited with status %s; starting again in %s s", self.name, status, delay_s
            )
            self._next_start_s = loop.time() + delay_s
            await asyncio.sleep(delay_s)
            self._next_start_s = None
            self.num_restarts += 1
            self._process = await start_worker(self.config)
