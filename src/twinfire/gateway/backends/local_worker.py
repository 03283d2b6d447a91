"""A worker process on this machine: started, connected, watched and started again by the gateway.

Owns the child process and its link. The child ends when its standard input closes, so it cannot
outlive the gateway however that ends.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import uuid
from array import array
from collections.abc import Callable
from pathlib import Path

import msgspec

from twinfire.gateway.backends.generation import LinkGeneration
from twinfire.gateway.backends.request_context import NO_CONTEXT, RequestContext
from twinfire.gateway.backends.worker_child import RestartDelays, end_worker, start_worker
from twinfire.gateway.backends.worker_link import State, WorkerLink
from twinfire.protocol.errors import Overloaded, WorkerLost
from twinfire.protocol.messages import Failed, Load, Loading, Ready, WorkerInfo
from twinfire.protocol.sampling import SamplingParams
from twinfire.protocol.worker_config import WorkerConfig

CONNECT_POLL_S = 0.02
DRAIN_LIMIT_S = 10.0
UNLINKED_LIMIT_S = 2.0
"""How long a process whose link is gone may take to end."""

log = logging.getLogger(__name__)


def _ignore_state(_: State) -> None:
    pass


def _ignore_load(_: Load) -> None:
    pass


class LocalWorker:
    """The backend of `twinfire serve`: one mixed worker.

    A worker that dies while serving is started again with growing delays; one that fails before it
    was ever ready is not, since the same fault would meet it again: `failure` then says why.
    """

    def __init__(
        self,
        config: WorkerConfig,
        on_state: Callable[[State], None] = _ignore_state,
    ) -> None:
        self._on_state = on_state
        self._on_load: Callable[[Load], None] = _ignore_load
        self._folder = tempfile.TemporaryDirectory(prefix="twinfire-")
        self._config = config
        self._gateway_id = uuid.uuid4().hex
        self._process: asyncio.subprocess.Process | None = None
        self._link: WorkerLink | None = None
        self._link_closed = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None
        self._state: State = Loading("starting")
        self._was_ready = False
        self._num_waiting = 0
        """Requests without blocks, as the worker reported last."""
        self._stopping = False
        self.settled = asyncio.Event()
        """Set once the worker has been ready or has failed for good."""

    @property
    def worker_info(self) -> WorkerInfo | None:
        """The worker's description, None until it is ready."""
        return self._link.worker_info if self._link else None

    @property
    def pid(self) -> int | None:
        """Process id of the worker, None when none runs."""
        return self._process.pid if self._process else None

    @property
    def failure(self) -> str | None:
        """Why the worker will not come back, None while it may."""
        return self._state.message if isinstance(self._state, Failed) else None

    @property
    def unready_reason(self) -> str | None:
        """Why no request can be served now, None when one can."""
        if self.worker_info is not None:
            return None
        if isinstance(self._state, Loading):
            return f"loading: {self._state.stage}"
        return self.failure or "the worker is restarting"

    def submit(
        self,
        prompt: array[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        context: RequestContext = NO_CONTEXT,
    ) -> LinkGeneration:
        """Send a request; WorkerLost when no worker is ready.

        Overloaded when it would have to wait and the context says that it must not.
        """
        if self._link is None or self._link.worker_info is None:
            raise WorkerLost(self.unready_reason or "no worker is ready")
        if context.reject_if_busy and self._is_busy(self._link, self._link.worker_info):
            raise Overloaded("the worker is busy")
        return self._link.submit(prompt, sampling, priority, cache_salt, context)

    def _is_busy(self, link: WorkerLink, worker: WorkerInfo) -> bool:
        """Whether one more request would wait. An idle worker's last report may be an old one."""
        is_waited_for = self._num_waiting > 0 and link.num_in_flight > 0
        return is_waited_for or link.num_in_flight >= worker.max_num_seqs

    def _observe_load(self, load: Load) -> None:
        self._num_waiting = load.waiting
        self._on_load(load)

    def report_load_to(self, on_load: Callable[[Load], None]) -> None:
        """Call `on_load` with the load after each engine step, from now on."""
        self._on_load = on_load

    async def start(self) -> None:
        """Start the worker process and return; `settled` tells when it is ready."""
        await self._spawn()
        self._supervisor = asyncio.create_task(self._supervise())

    async def stop(self) -> None:
        """End the worker, letting it finish what it runs for a while."""
        self._stopping = True
        if self._supervisor is not None:
            self._supervisor.cancel()
        if self._process is not None:
            await end_worker(self._process, DRAIN_LIMIT_S)
        if self._link is not None:
            self._link.close()
        self._folder.cleanup()

    async def _supervise(self) -> None:
        loop = asyncio.get_running_loop()
        delays = RestartDelays()
        while True:
            started_s = loop.time()
            self._was_ready = False
            exit_code = await self._serve_one_life()
            if not self._was_ready:
                self._fail(exit_code)
                return
            delay_s = delays.after(loop.time() - started_s)
            log.error("the worker exited with status %s; restarting in %s s", exit_code, delay_s)
            self._set_state(Loading(f"restarting after the worker exited with status {exit_code}"))
            await asyncio.sleep(delay_s)
            await self._spawn()

    async def _serve_one_life(self) -> int:
        """Connect, wait for the process to end, and return its status."""
        process = self._process
        assert process is not None
        ended = asyncio.create_task(process.wait())
        connecting = asyncio.create_task(self._connect())
        await asyncio.wait({ended, connecting}, return_when=asyncio.FIRST_COMPLETED)
        if not connecting.done():
            connecting.cancel()
            return await ended
        closed = asyncio.create_task(self._link_closed.wait())
        await asyncio.wait({ended, closed}, return_when=asyncio.FIRST_COMPLETED)
        closed.cancel()
        if not ended.done():
            # A process without its link serves nobody; it is asked to go, then made to.
            await end_worker(process, UNLINKED_LIMIT_S)
        exit_code = await ended
        if self._link is not None:
            self._link.close()
            await self._link_closed.wait()
            self._link = None
        return exit_code

    async def _spawn(self) -> None:
        socket_path = str(Path(self._folder.name) / f"worker-{uuid.uuid4().hex[:8]}.sock")
        self._config = msgspec.structs.replace(self._config, socket_path=socket_path)
        self._link_closed = asyncio.Event()
        self._process = await start_worker(self._config)

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                _, self._link = await loop.create_unix_connection(
                    self._new_link, self._config.socket_path
                )
                return
            except (FileNotFoundError, ConnectionRefusedError):
                await asyncio.sleep(CONNECT_POLL_S)

    def _new_link(self) -> WorkerLink:
        return WorkerLink(
            self._gateway_id,
            on_state=self._set_state,
            on_load=self._observe_load,
            on_closed=self._link_closed.set,
        )

    def _set_state(self, state: State) -> None:
        self._state = state
        if isinstance(state, Ready):
            self._was_ready = True
            self.settled.set()
        self._on_state(state)

    def _fail(self, exit_code: int) -> None:
        if not isinstance(self._state, Failed):
            self._set_state(Failed(f"the worker exited with status {exit_code} while loading"))
        self.settled.set()
