"""One worker: an engine fed from links, until it is told to stop.

The engine runs on the calling thread; links, connector and the watch on the parent process have
their own. Idle it sleeps on the inbox, busy it looks there between steps. Draining it refuses new
requests and ends when the running ones have, and nobody needs its blocks.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Mapping

import msgspec

from twinfire.engine.engine import Engine
from twinfire.engine.step_report import GatewayOutput
from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.messages import (
    Cancel,
    DrainWorker,
    Failed,
    HandOffFailed,
    Ready,
    Refused,
    Rejected,
    Reserve,
    ResyncCache,
    Role,
    SetRole,
    StepFrame,
    Submit,
    WorkerInfo,
)
from twinfire.transfer.block_reads import ReadEnded
from twinfire.transfer.fault_points import FaultPoints
from twinfire.worker.cache_reports import CacheReports
from twinfire.worker.exchange import Exchange, rejection
from twinfire.worker.gateway_links import GatewayLinks
from twinfire.worker.inbox import (
    Drain,
    FromGateway,
    FromPeer,
    GatewayJoined,
    GatewayLost,
    Inbox,
    InboxItem,
    PeerLost,
    Stop,
)
from twinfire.worker.kv_populator import KvPopulator
from twinfire.worker.liveness import LivenessWatch
from twinfire.worker.load_reports import LoadReports

DRAIN_LIMIT_S = 60.0
IDLE_WAIT_S = 0.5
"""How long an idle worker sleeps: short of the second after which it says that it lives."""
STALLED_WAIT_S = 0.005
"""The same when all requests wait for blocks that others hold."""
ACTIVE_WAIT_S = 0.05
"""The same while anything is held for others or waits for them."""

log = logging.getLogger(__name__)


class Worker:
    """Couples an engine to its links. Without an exchange it serves alone."""

    def __init__(
        self,
        engine: Engine,
        gateways: GatewayLinks,
        inbox: Inbox,
        info: WorkerInfo,
        *,
        populator: KvPopulator | None = None,
        watch: LivenessWatch | None = None,
        faults: FaultPoints | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._gateways = gateways
        self._inbox = inbox
        self._info = info
        self._populator = populator
        self._watch = watch
        self._faults = faults or FaultPoints()
        self._clock = clock
        self._exchange: Exchange | None = None
        self._cache_reports = CacheReports(engine, gateways, clock)
        self._load_reports = LoadReports(engine, gateways)
        self._num_passes = 0
        self._drain_deadline_s: float | None = None
        self._stopping = False
        self._stalled = False

    def attach(self, exchange: Exchange) -> None:
        """Exchange KV with other workers; before `run`."""
        self._exchange = exchange
        self._load_reports.attach(exchange)

    @property
    def num_passes(self) -> int:
        """Rises while the loop turns, idle or not. May be read on any thread."""
        return self._num_passes

    def run(self) -> None:
        """Serve until drained or stopped. An engine fault is announced and raised."""
        self._gateways.announce(Ready(self._info))
        try:
            while not self._done():
                self._pass()
        except Exception as error:
            self._gateways.announce(Failed(f"the engine failed: {type(error).__name__}: {error}"))
            raise

    def accepted(self, gateway_id: str, output: GatewayOutput) -> None:
        """Send the first tokens of a hand-off."""
        self._send_output(gateway_id, output)
        self._load_reports.changed()

    def _pass(self) -> None:
        self._num_passes += 1
        self._read_inbox()
        if self._exchange is not None:
            self._exchange.pump()
        if self._engine.has_work and not self._stopping:
            self._step()
        elif not self._load_reports.idle_is_up_to_date:
            self._report_idle()
        self._cache_reports.pump()
        if self._populator is not None:
            self._populator.follow(self._engine.num_blocks_handed_out)

    def _done(self) -> bool:
        if self._stopping:
            return True
        if self._drain_deadline_s is None:
            return False
        return not self._has_work or self._clock() > self._drain_deadline_s

    @property
    def _has_work(self) -> bool:
        """Whether anything would be lost if this worker ended."""
        is_active = self._exchange is not None and self._exchange.is_active
        return self._engine.has_work or is_active

    def _read_inbox(self) -> None:
        """Handle what has arrived; wait for something when there is nothing else to do."""
        timeout_s = self._wait_s()
        while True:
            try:
                item = self._inbox.get(block=timeout_s > 0, timeout=timeout_s or None)
            except queue.Empty:
                item = None
            # Before anything else: what this process stood still for it must not answer for.
            self._fence()
            if item is None:
                return
            timeout_s = 0.0
            self._handle(item)

    def _wait_s(self) -> float:
        if self._engine.has_work:
            return STALLED_WAIT_S if self._stalled else 0.0
        if not self._load_reports.idle_is_known:
            return 0.0
        is_active = self._exchange is not None and self._exchange.is_active
        return ACTIVE_WAIT_S if is_active else IDLE_WAIT_S

    def _fence(self) -> None:
        gap_s = self._watch.take_gap_s() if self._watch is not None else 0.0
        if gap_s > 0 and self._exchange is not None:
            log.warning("stood still for %.1f s: dropping what was held for others", gap_s)
            self._exchange.fence(f"worker {self._info.instance_id} stood still for {gap_s:.1f} s")

    def _handle(self, item: InboxItem) -> None:
        match item:
            case FromGateway(gateway_id, message):
                self._handle_gateway(gateway_id, message)
            case GatewayJoined(gateway_id):
                self._cache_reports.send_all(gateway_id)
                self._load_reports.changed()
            case GatewayLost(gateway_id):
                self._gateway_lost(gateway_id)
            case FromPeer() if self._exchange is not None:
                self._exchange.received(item)
            case PeerLost() if self._exchange is not None:
                self._exchange.peer_lost(item)
            case ReadEnded() if self._exchange is not None:
                self._exchange.read_ended(item)
            case Drain():
                self._drain()
            case Stop():
                self._stopping = True
            case _:
                raise AssertionError(f"{item} came to a worker that exchanges nothing")

    def _handle_gateway(self, gateway_id: str, message: object) -> None:
        match message:
            case Submit():
                self._submit(gateway_id, message)
            case Reserve():
                self._reserve(gateway_id, message)
            case Cancel(request_id, choice):
                if self._exchange is not None:
                    self._exchange.cancel(gateway_id, request_id, choice)
                else:
                    self._engine.cancel(gateway_id, request_id, choice)
                self._load_reports.changed()
            case SetRole(role):
                self._set_role(role)
            case DrainWorker():
                self._drain()
            case ResyncCache():
                self._cache_reports.send_all(gateway_id)
            case Refused(reason):
                log.error("gateway %s refuses this worker: %s", gateway_id, reason)

    def _submit(self, gateway_id: str, message: Submit) -> None:
        self._load_reports.charge(gateway_id, message.request_id)
        if self._drain_deadline_s is not None:
            refusal = Rejected(message.request_id, "the worker is draining", status=503)
            self._gateways.send(gateway_id, refusal)
        elif self._exchange is not None:
            self._exchange.submit(gateway_id, message)
        elif message.hand_off is not None:
            self._refuse_hand_off(gateway_id, message, "the worker exchanges no KV")
        else:
            try:
                self._engine.submit(gateway_id, message)
            except InvalidRequest as error:
                self._gateways.send(gateway_id, rejection(message, error))

    def _reserve(self, gateway_id: str, message: Reserve) -> None:
        self._load_reports.charge(gateway_id, message.submit.request_id)
        if self._drain_deadline_s is not None:
            self._refuse_hand_off(gateway_id, message.submit, "the worker is draining")
        elif self._exchange is None:
            self._refuse_hand_off(gateway_id, message.submit, "the worker exchanges no KV")
        else:
            self._exchange.reserve(gateway_id, message)

    def _refuse_hand_off(self, gateway_id: str, submit: Submit, reason: str) -> None:
        failure = HandOffFailed(submit.request_id, submit.attempt, reason)
        self._gateways.send(gateway_id, failure)

    def _gateway_lost(self, gateway_id: str) -> None:
        if self._exchange is not None:
            self._exchange.gateway_lost(gateway_id)
        self._engine.cancel_gateway(gateway_id)
        self._load_reports.forget(gateway_id)

    def _set_role(self, role: Role) -> None:
        self._info = msgspec.structs.replace(self._info, role=role)
        self._gateways.announce(Ready(self._info))

    def _drain(self) -> None:
        if self._drain_deadline_s is None:
            self._drain_deadline_s = self._clock() + DRAIN_LIMIT_S
            self._info = msgspec.structs.replace(self._info, draining=True)
            self._gateways.announce(Ready(self._info))

    def _step(self) -> None:
        outputs = self._engine.step()
        self._hit_step_faults(outputs)
        self._fence()
        for gateway_id, output in outputs.items():
            self._send_output(gateway_id, output)
        if self._exchange is not None:
            self._exchange.after_step()
        self._stalled = not outputs and self._engine.load().step_tokens == 0
        self._load_reports.changed()

    def _hit_step_faults(self, outputs: Mapping[str, GatewayOutput]) -> None:
        if any(output.progress for output in outputs.values()):
            self._faults.hit("prefill.step")
        if any(output.deltas for output in outputs.values()):
            self._faults.hit("decode.step")

    def _send_output(self, gateway_id: str, output: GatewayOutput) -> None:
        frame = StepFrame(
            self._load_reports.load(gateway_id, self._num_passes),
            tuple(output.prompts),
            tuple(output.deltas),
            tuple(output.progress),
            tuple(output.preempted),
        )
        self._gateways.send(gateway_id, frame)
        for rejected in output.rejected:
            self._gateways.send(gateway_id, rejected)

    def _report_idle(self) -> None:
        self._engine.check_integrity()
        self._cache_reports.pump(at_once=True)
        self._load_reports.report_idle(self._num_passes)
