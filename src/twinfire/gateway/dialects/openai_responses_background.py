"""Responses that go on without their client: run, watched from elsewhere, called off.

A response that runs in the background has an exchange of its own, whose client is this file: it
reads the events into a log, from which any number of clients stream, each from where it likes.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Awaitable, Callable

from starlette.types import Message as AsgiMessage

from twinfire.gateway.dialects.openai_responses_items import ResponseObject
from twinfire.gateway.exchange import Exchange
from twinfire.gateway.gateway import Gateway
from twinfire.gateway.response_store.stored_response import ResponseStore

_WATCH_INTERVAL_S = 2.0
_MAX_KEPT_EVENT_BYTES = 32 * 1024 * 1024
"""Of one response's stream; a longer one can be read while it runs, and not streamed again."""
_EVENT = b"event: "

Work = Callable[[Exchange], Awaitable[None]]

log = logging.getLogger(__name__)


class EventLog:
    """The events of one response as they come, in order from number 0."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.is_complete = False
        self._changed = asyncio.Event()

    def add(self, frames: bytes) -> None:
        """Add whole events; comments and `[DONE]` are no part of the log."""
        events = (frame for frame in frames.split(b"\n\n") if frame.startswith(_EVENT))
        self.frames += [event + b"\n\n" for event in events]
        self._wake()

    def complete(self) -> None:
        """Nothing more comes."""
        self.is_complete = True
        self._wake()

    async def beyond(self, count: int) -> bytes:
        """Return all events from number `count` on, once there are some; b"" at the end."""
        while len(self.frames) <= count and not self.is_complete:
            await self._changed.wait()
        return b"".join(self.frames[count:])

    def packed(self) -> bytes | None:
        """Return the log for the store, None for one that is too long."""
        if sum(map(len, self.frames)) > _MAX_KEPT_EVENT_BYTES:
            return None
        return zlib.compress(b"".join(self.frames))

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def unpacked_events(packed: bytes, count: int) -> bytes:
    """Return the events from number `count` on of a log that was stored."""
    frames = zlib.decompress(packed).split(b"\n\n")[:-1]
    return b"".join(frame + b"\n\n" for frame in frames[count:])


class BackgroundRun:
    """One response that is being made. `exchange` is what its generation answers to."""

    response: ResponseObject
    """What it is by now; set before it starts."""

    def __init__(self, gateway: Gateway, client: Exchange) -> None:
        self.events = EventLog()
        self.is_unwanted = False
        self.settled = asyncio.Event()
        """Set once what it became is stored."""
        self._left = asyncio.Event()
        scope = {
            "type": "http",
            # There is no body to wait for: the request was read with its own exchange.
            "method": "GET",
            "path": "/v1/responses",
            "headers": client.headers.raw,
            "client": (client.client_host, 0),
        }
        self.exchange = Exchange(scope, self._receive, self._send, gateway.settings)
        self.exchange.identity = client.identity

    def call_off(self) -> None:
        """End the generation, as a client does that leaves."""
        self.is_unwanted = True
        self._left.set()

    async def _receive(self) -> AsgiMessage:
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: AsgiMessage) -> None:
        if message["type"] == "http.response.body":
            self.events.add(message.get("body", b""))


class BackgroundRuns:
    """All responses that this gateway makes in the background."""

    def __init__(self, gateway: Gateway, store: ResponseStore) -> None:
        self._gateway = gateway
        self._store = store
        self._runs: dict[str, BackgroundRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._watch: asyncio.Task[None] | None = None

    def get(self, response_id: str) -> BackgroundRun | None:
        """Return a response that is being made here."""
        return self._runs.get(response_id)

    def start(self, run: BackgroundRun, work: Work, settle: Callable[[], Awaitable[None]]) -> None:
        """Do `work` for the run's exchange, then `settle`, however it ended."""
        self._gateway.enter(run.exchange)
        self._runs[run.response.id] = run
        task = asyncio.create_task(self._run(run, work, settle))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._watch_store())

    async def _run(
        self, run: BackgroundRun, work: Work, settle: Callable[[], Awaitable[None]]
    ) -> None:
        try:
            await run.exchange.run(work)
            await settle()
        except Exception:
            log.exception("response %s could not be kept", run.response.id)
        finally:
            del self._runs[run.response.id]
            run.events.complete()
            run.settled.set()
            self._gateway.leave(run.exchange)

    async def _watch_store(self) -> None:
        """Tell the store that the runs go on, and learn which another gateway called off."""
        while self._runs:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            try:
                unwanted = await self._store.keep_alive(list(self._runs))
            except Exception:
                log.exception("the store of responses cannot be reached")
                continue
            for response_id in unwanted:
                run = self._runs.get(response_id)
                if run is not None:
                    run.call_off()
