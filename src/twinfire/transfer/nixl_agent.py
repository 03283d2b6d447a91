"""The NIXL agent of a process, and the one thread that ever calls it.

Without NIXL's own progress thread, which would burn a core, somebody must call in while anything
moves, on the end that is read from as well; this thread does, and sleeps otherwise. A read that its
caller gave up is watched to its end all the same: NIXL may still write its memory, also after the
handle has been released.
"""

from __future__ import annotations

import importlib
import logging
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from twinfire.transfer.carrier import CarrierFailed
from twinfire.transfer.waker import Waker

R = TypeVar("R")

_SPIN_S = 0.0003
"""How long progress is made without sleeping after something moved; most reads are done by then."""
_POLL_S = 0.0005
_WATCH_S = 0.05
"""Between looks at reads that were given up."""

log = logging.getLogger(__name__)


class _NixlApi(Protocol):
    """What is used of `nixl_cu12`'s agent; addresses are (start, bytes, device)."""

    def register_memory(self, reg_list: list[tuple[int, int, int, str]], mem_type: str) -> Any: ...
    def get_partial_agent_metadata(
        self, descs: Any, inc_conn_info: bool, backends: list[str]
    ) -> bytes: ...
    def add_remote_agent(self, metadata: bytes) -> bytes: ...
    def remove_remote_agent(self, agent: bytes) -> None: ...
    def get_xfer_descs(self, descs: list[tuple[int, int, int]], mem_type: str) -> Any: ...
    def initialize_xfer(
        self, operation: str, local_descs: Any, remote_descs: Any, remote_agent: bytes
    ) -> Any: ...
    def transfer(self, handle: Any) -> str: ...
    def check_xfer_state(self, handle: Any) -> str: ...
    def release_xfer_handle(self, handle: Any) -> None: ...
    def get_new_notifs(self) -> dict[str, list[bytes]]: ...


class NixlRead:
    """Bytes under way from a peer's memory into this process's."""

    def __init__(self, peer: bytes, handle: Any) -> None:
        self.peer = peer
        self.handle = handle
        self.succeeded = False
        self.abandoned = False
        """Whether nobody waits for it any more."""
        self._ended = threading.Event()
        self._on_end: Callable[[], None] | None = None
        self._lock = threading.Lock()

    def wait(self, timeout_s: float) -> bool:
        """Return whether it has ended; nothing is written by it then."""
        return self._ended.wait(timeout_s)

    def end(self, succeeded: bool) -> None:
        """Tell whoever waits; the agent's thread calls it once."""
        self.succeeded = succeeded
        with self._lock:
            self._ended.set()
            on_end = self._on_end
        if on_end is not None:
            on_end()

    def abandon(self, on_end: Callable[[], None]) -> None:
        """Stop waiting; `on_end` is called when it has ended, at once if it has already."""
        with self._lock:
            self.abandoned = True
            ended = self._ended.is_set()
            if not ended:
                self._on_end = on_end
        if ended:
            on_end()


class NixlAgent:
    """Safe to call from any thread; every call but `close` waits for the agent's thread."""

    def __init__(self, instance_id: str) -> None:
        self._name = f"{instance_id}-{secrets.token_hex(4)}"
        self._waker = Waker()
        self._calls: deque[Callable[[_NixlApi], None]] = deque()
        self._reads: list[NixlRead] = []
        self._peers: Counter[bytes] = Counter()
        self._num_exposed = 0
        self._lock = threading.Lock()
        self._closed = False
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="nixl", daemon=True)
        self._thread.start()
        started.result()

    def register(self, address: int, num_bytes: int) -> bytes:
        """Make memory readable and writable by NIXL; return what a peer must know to read it."""

        def register(api: _NixlApi) -> bytes:
            region = api.register_memory([(address, num_bytes, 0, "")], "DRAM")
            return api.get_partial_agent_metadata(region, True, ["UCX"])

        return self._call(register)

    def add_peer(self, metadata: bytes) -> bytes:
        """Return the name of the agent that `metadata` is of; CarrierFailed when it is of none."""

        def add(api: _NixlApi) -> bytes:
            name = api.add_remote_agent(metadata)
            self._peers[name] += 1
            return name

        return self._call(add)

    def drop_peer(self, name: bytes) -> None:
        """Undo an `add_peer`; the peer is forgotten when nothing of it is left."""
        self._call(lambda api: self._drop(api, name))

    def read(self, peer: bytes, remote_address: int, address: int, num_bytes: int) -> NixlRead:
        """Begin to read; CarrierFailed when the peer is gone."""

        def post(api: _NixlApi) -> NixlRead:
            local = api.get_xfer_descs([(address, num_bytes, 0)], "DRAM")
            remote = api.get_xfer_descs([(remote_address, num_bytes, 0)], "DRAM")
            handle = api.initialize_xfer("READ", local, remote, peer)
            read = NixlRead(peer, handle)
            state = api.transfer(handle)
            if state == "PROC":
                self._peers[peer] += 1
                self._reads.append(read)
            else:
                api.release_xfer_handle(handle)
                read.end(state == "DONE")
            return read

        return self._call(post)

    def expose(self, change: int) -> None:
        """Count places that peers may be reading; while there are any, progress is made."""
        with self._lock:
            self._num_exposed += change
        self._waker.notify()

    def close(self, timeout_s: float) -> None:
        """End the thread; reads under way end without success."""
        self._waker.stop()
        self._thread.join(timeout_s)

    def _call(self, function: Callable[[_NixlApi], R]) -> R:
        future: Future[R] = Future()

        def run(api: _NixlApi) -> None:
            try:
                future.set_result(function(api))
            except Exception as error:
                future.set_exception(CarrierFailed(f"NIXL: {error}"))

        with self._lock:
            if self._closed:
                raise CarrierFailed("the NIXL agent is closed")
            self._calls.append(run)
        self._waker.notify()
        return future.result()

    def _run(self, started: Future[None]) -> None:
        try:
            api = _make_api(self._name)
        except Exception as error:
            self._closed = True
            started.set_exception(error)
            return
        started.set_result(None)
        moved_at = 0.0
        while not self._waker.stopped:
            if self._run_calls(api):
                moved_at = time.monotonic()
            busy = self._num_exposed > 0 or any(not read.abandoned for read in self._reads)
            if busy or self._reads:
                if self._make_progress(api):
                    moved_at = time.monotonic()
                if not busy:
                    self._waker.wait(_WATCH_S)
                elif time.monotonic() - moved_at > _SPIN_S:
                    self._waker.wait(_POLL_S)
            elif not self._calls:
                self._waker.wait()
        with self._lock:
            self._closed = True
        self._run_calls(api)
        for read in self._reads:
            read.end(False)
        self._waker.close()

    def _run_calls(self, api: _NixlApi) -> bool:
        any_calls = False
        while self._calls:
            self._calls.popleft()(api)
            any_calls = True
        return any_calls

    def _make_progress(self, api: _NixlApi) -> bool:
        """Return whether a read has ended."""
        if not self._reads:
            try:
                api.get_new_notifs()
            except Exception as error:
                log.warning("NIXL made no progress: %s", error)
            return False
        under_way = []
        for read in self._reads:
            try:
                state = api.check_xfer_state(read.handle)
            except Exception as error:
                log.warning("a read of %r broke: %s", read.peer, error)
                state = "ERR"
            if state == "PROC":
                under_way.append(read)
                continue
            try:
                api.release_xfer_handle(read.handle)
            except Exception as error:
                log.warning("NIXL keeps a read that has ended: %s", error)
            self._drop(api, read.peer)
            read.end(state == "DONE")
        any_ended = len(under_way) < len(self._reads)
        self._reads = under_way
        return any_ended

    def _drop(self, api: _NixlApi, name: bytes) -> None:
        self._peers[name] -= 1
        if self._peers[name] == 0:
            del self._peers[name]
            try:
                api.remove_remote_agent(name)
            except Exception as error:
                log.debug("NIXL knew nothing of %r any more: %s", name, error)


def _make_api(name: str) -> _NixlApi:
    """Import NIXL and make its agent; ImportError when it is not installed."""
    nixl = importlib.import_module("nixl_cu12")
    # It writes to stdout unless told otherwise, which is not its own here.
    nixl_log = logging.getLogger("nixl")
    nixl_log.handlers.clear()
    nixl_log.propagate = True
    nixl_log.setLevel(logging.WARNING)
    config = nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
    api: _NixlApi = nixl.nixl_agent(name, config)
    return api
