"""One worker: an engine fed from links, until it is told to stop.

The engine runs on the calling thread; links and the watch on the parent process have their own.
Idle it sleeps on the inbox, busy it looks there between steps. Draining it refuses new requests
and ends when the running ones have.
"""

from __future__ import annotations

import logging
import queue
import time
from dataclasses import dataclass

from twinfire.engine.engine import Engine
from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.messages import (
    Cancel,
    Failed,
    Ready,
    Rejected,
    StepFrame,
    Submit,
    WorkerInfo,
)
from twinfire.worker.link_server import FromGateway, GatewayLost, Inbound, LinkServer

DRAIN_LIMIT_S = 60.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Drain:
    """Finish what runs, take nothing new, end."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End now."""


Inbox = queue.SimpleQueue[Inbound | Drain | Stop]


class Worker:
    """Couples an engine to its links."""

    def __init__(self, engine: Engine, links: LinkServer, inbox: Inbox, info: WorkerInfo) -> None:
        self._engine = engine
        self._links = links
        self._inbox = inbox
        self._info = info
        self._drain_deadline_s: float | None = None
        self._stopping = False
        self._idle_reported = False

    def run(self) -> None:
        """Serve until drained or stopped. An engine fault is announced and raised."""
        self._links.announce(Ready(self._info))
        try:
            while not self._done():
                self._read_inbox()
                if self._engine.has_work and not self._stopping:
                    self._step()
                elif not self._idle_reported:
                    self._report_idle()
        except Exception as error:
            self._links.announce(Failed(f"the engine failed: {type(error).__name__}: {error}"))
            raise

    def _done(self) -> bool:
        if self._stopping:
            return True
        if self._drain_deadline_s is None:
            return False
        return not self._engine.has_work or time.monotonic() > self._drain_deadline_s

    def _read_inbox(self) -> None:
        """Handle what has arrived; wait for something when there is nothing else to do."""
        block = not self._engine.has_work and self._idle_reported
        while True:
            try:
                item = self._inbox.get(block=block)
            except queue.Empty:
                return
            block = False
            self._handle(item)

    def _handle(self, item: Inbound | Drain | Stop) -> None:
        match item:
            case FromGateway(gateway_id, Submit() as message):
                self._submit(gateway_id, message)
            case FromGateway(gateway_id, Cancel(request_id, choice)):
                self._engine.cancel(gateway_id, request_id, choice)
                self._idle_reported = False
            case GatewayLost(gateway_id):
                self._engine.cancel_gateway(gateway_id)
                self._idle_reported = False
            case Drain():
                if self._drain_deadline_s is None:
                    self._drain_deadline_s = time.monotonic() + DRAIN_LIMIT_S
            case Stop():
                self._stopping = True

    def _submit(self, gateway_id: str, message: Submit) -> None:
        if self._drain_deadline_s is not None:
            refusal = Rejected(message.request_id, "the worker is draining", status=503)
            self._links.send(gateway_id, refusal)
            return
        try:
            self._engine.submit(gateway_id, message)
        except InvalidRequest as error:
            refusal = Rejected(
                message.request_id, error.message, param=error.param, code=error.code
            )
            self._links.send(gateway_id, refusal)

    def _step(self) -> None:
        outputs = self._engine.step()
        load = self._engine.load()
        for gateway_id, output in outputs.items():
            frame = StepFrame(load, tuple(output.prompts), tuple(output.deltas))
            self._links.send(gateway_id, frame)
        self._idle_reported = False

    def _report_idle(self) -> None:
        """Tell the gateways once that nothing runs, so that their gauges fall to zero."""
        self._engine.check_integrity()
        self._links.broadcast(StepFrame(self._engine.load()))
        self._idle_reported = True
