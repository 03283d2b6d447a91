"""The worker's end of its links: a Unix socket that gateways connect to.

Runs an event loop on a thread of its own, so that the engine never waits for a peer. Owns the
connections and what is buffered for them; a gateway that does not read is dropped, never waited
for.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from twinfire.protocol.framing import FrameDecoder, FrameError, encode_frame, worker_side_decoder
from twinfire.protocol.messages import (
    PROTOCOL_VERSION,
    Failed,
    Hello,
    Loading,
    Ready,
    ToGateway,
    ToWorker,
    WorkerCommand,
)
from twinfire.worker.frame_writer import FrameWriter

MAX_UNREAD_BYTES = 32 * 1024 * 1024
"""What may wait for one gateway before it is dropped."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FromGateway:
    """A message with the id of its sender."""

    gateway_id: str
    message: WorkerCommand


@dataclass(frozen=True, slots=True)
class GatewayLost:
    """A gateway's link is closed; nobody waits for its requests any more."""

    gateway_id: str


Inbound = FromGateway | GatewayLost


class LinkServer:
    """Accepts gateways; `deliver` is called on the link thread for each inbound message."""

    def __init__(
        self,
        socket_path: str,
        deliver: Callable[[Inbound], None],
        max_unread_bytes: int = MAX_UNREAD_BYTES,
    ) -> None:
        self._socket_path = socket_path
        self._deliver = deliver
        self.max_unread_bytes = max_unread_bytes
        self._loop = asyncio.new_event_loop()
        self._links: dict[str, _Link] = {}
        self._greeting: Loading | Ready | Failed = Loading("starting")
        self._thread = threading.Thread(target=self._run, name="links", daemon=True)
        self._listening = threading.Event()
        self._has_gateway = threading.Event()
        self._startup_error: OSError | None = None

    def start(self) -> None:
        """Listen; OSError when the socket cannot be made."""
        self._thread.start()
        self._listening.wait()
        if self._startup_error is not None:
            raise self._startup_error

    def announce(self, state: Loading | Ready | Failed) -> None:
        """Tell every gateway, now and when it connects, how far this worker is."""
        self._loop.call_soon_threadsafe(self._announce, state)

    def send(self, gateway_id: str, message: ToGateway) -> None:
        """Send to one gateway; nothing happens when it is gone. Never blocks."""
        link = self._links.get(gateway_id)
        if link is not None:
            link.write(encode_frame(message))

    def broadcast(self, message: ToGateway) -> None:
        """Send to every connected gateway."""
        self._write_all(encode_frame(message))

    def wait_for_gateway(self, timeout_s: float) -> bool:
        """Wait until a gateway has connected; return whether one has."""
        return self._has_gateway.wait(timeout_s)

    def stop(self, flush_s: float = 1.0) -> None:
        """Write out what is buffered, at most for `flush_s`, and close."""
        stopping = asyncio.run_coroutine_threadsafe(self._flush(flush_s), self._loop)
        stopping.result(flush_s + 1.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(flush_s + 1.0)

    def joined(self, gateway_id: str, link: _Link) -> None:
        """A gateway said hello on `link`."""
        replaced = self._links.pop(gateway_id, None)
        if replaced is not None:
            replaced.close()
        # First of all: from then on other threads may write to it.
        link.write(encode_frame(self._greeting))
        self._links[gateway_id] = link
        self._has_gateway.set()

    def received(self, gateway_id: str, message: WorkerCommand) -> None:
        """A gateway asked for something."""
        self._deliver(FromGateway(gateway_id, message))

    def left(self, gateway_id: str, link: _Link) -> None:
        """A link is closed."""
        if self._links.get(gateway_id) is link:
            del self._links[gateway_id]
        self._deliver(GatewayLost(gateway_id))

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(
                self._loop.create_unix_server(lambda: _Link(self, self._loop), self._socket_path)
            )
            os.chmod(self._socket_path, 0o600)
        except OSError as error:
            self._startup_error = error
            return
        finally:
            self._listening.set()
        self._loop.run_forever()
        self._loop.close()

    def _announce(self, state: Loading | Ready | Failed) -> None:
        self._greeting = state
        self._write_all(encode_frame(state))

    def _write_all(self, frame: bytes) -> None:
        for link in list(self._links.values()):
            link.write(frame)

    async def _flush(self, flush_s: float) -> None:
        deadline_s = self._loop.time() + flush_s
        while any(link.unread_bytes for link in self._links.values()):
            if self._loop.time() > deadline_s:
                break
            await asyncio.sleep(0.01)
        for link in list(self._links.values()):
            link.close()


class _Link(asyncio.Protocol):
    """One connection. A frame that cannot be from a healthy peer closes it and nothing else."""

    def __init__(self, server: LinkServer, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop
        self._decoder: FrameDecoder[ToWorker] = worker_side_decoder()
        self._writer: FrameWriter | None = None
        self._gateway_id: str | None = None

    @property
    def unread_bytes(self) -> int:
        """Bytes written that the gateway has not taken."""
        return self._writer.unread_bytes if self._writer else 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Make a writer."""
        # A loop's transports need not derive from asyncio's.
        self._writer = FrameWriter(
            cast(asyncio.Transport, transport), self._loop, self._server.max_unread_bytes
        )

    def data_received(self, data: bytes) -> None:
        """Decode and hand over."""
        try:
            for message in self._decoder.feed(data):
                self._handle(message)
        except FrameError as error:
            log.warning("closing a link: %s", error)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Report a gateway that had introduced itself."""
        if self._writer is not None:
            self._writer.closed()
        if self._gateway_id is not None:
            self._server.left(self._gateway_id, self)

    def resume_writing(self) -> None:
        """All that was buffered is written."""
        if self._writer is not None:
            self._writer.flushed()

    def write(self, frame: bytes) -> None:
        """Send a frame, from any thread; a gateway that leaves too much unread is dropped."""
        if self._writer is not None:
            self._writer.write(frame)

    def close(self) -> None:
        """Close after what is buffered has been written."""
        if self._writer is not None:
            self._writer.close()

    def _handle(self, message: ToWorker) -> None:
        if isinstance(message, Hello):
            if message.protocol_version != PROTOCOL_VERSION:
                self._refuse(message)
                return
            self._gateway_id = message.gateway_id
            self._server.joined(message.gateway_id, self)
        elif self._gateway_id is None:
            raise FrameError("the first message was no hello")
        else:
            self._server.received(self._gateway_id, message)

    def _refuse(self, hello: Hello) -> None:
        self.write(
            encode_frame(
                Failed(
                    f"this worker speaks protocol {PROTOCOL_VERSION}, "
                    f"the gateway {hello.protocol_version}"
                )
            )
        )
        self.close()
