"""A worker's links to gateways, whoever opened them: accepted on its socket or dialled to join.

Owns the connections and what is buffered for them; a gateway that does not read is dropped, never
waited for. Says that the worker lives, from the links' thread and with the engine's own counter.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence

from twinfire.protocol.addresses import Address
from twinfire.protocol.framing import FrameError, encode_frame, worker_side_decoder
from twinfire.protocol.link_auth import LinkHandshake
from twinfire.protocol.messages import (
    PROTOCOL_VERSION,
    Alive,
    Failed,
    Hello,
    Loading,
    Ready,
    ToGateway,
    ToWorker,
)
from twinfire.protocol.unix_sockets import listen_unix
from twinfire.worker.framed_link import HANDSHAKE_LIMIT_S, MAX_UNREAD_BYTES, FramedLink
from twinfire.worker.gateway_joiner import GatewayJoiner
from twinfire.worker.inbox import FromGateway, GatewayJoined, GatewayLost
from twinfire.worker.link_security import LinkSecurity
from twinfire.worker.link_thread import LinkThread

ALIVE_PERIOD_S = 1.0

Deliver = Callable[[GatewayJoined | FromGateway | GatewayLost], None]

log = logging.getLogger(__name__)


class GatewayLinks:
    """All gateways that are connected; `deliver` is called on the links' thread."""

    def __init__(
        self, thread: LinkThread, deliver: Deliver, max_unread_bytes: int = MAX_UNREAD_BYTES
    ) -> None:
        self._thread = thread
        self._deliver = deliver
        self._max_unread_bytes = max_unread_bytes
        self._links: dict[str, FramedLink[ToWorker]] = {}
        self._greeting: Loading | Ready | Failed = Loading("starting")
        self._has_gateway = threading.Event()

    def listen(self, socket_path: str) -> None:
        """Accept gateways there; OSError when the socket cannot be made."""
        self._thread.result(self._listen(socket_path))

    def join(self, addresses: Sequence[Address], security: LinkSecurity) -> None:
        """Dial these gateways, again and again for as long as this worker lives."""
        for address in addresses:
            joiner = GatewayJoiner(address, security, self._new_link)
            self._thread.call(lambda joiner=joiner: self._spawn(joiner))  # type: ignore[misc]

    def begin_alive(self, step: Callable[[], int]) -> None:
        """Send the engine's counter every second from now on."""
        self._thread.call(lambda: self._say_alive(step))

    def announce(self, state: Loading | Ready | Failed) -> None:
        """Tell every gateway, now and when it connects, how far this worker is."""
        self._thread.call(lambda: self._announce(state))

    def send(self, gateway_id: str, message: ToGateway) -> None:
        """Send to one gateway; nothing happens when it is gone. Never blocks."""
        link = self._links.get(gateway_id)
        if link is not None:
            link.write(encode_frame(message))

    def broadcast(self, message: ToGateway) -> None:
        """Send to every connected gateway."""
        self._write_all(encode_frame(message))

    @property
    def gateway_ids(self) -> list[str]:
        """Who is connected."""
        return list(self._links)

    def wait_for_gateway(self, timeout_s: float) -> bool:
        """Wait until a gateway has connected; return whether one has."""
        return self._has_gateway.wait(timeout_s)

    def flush(self, limit_s: float = 1.0) -> None:
        """Write out what is buffered, at most for `limit_s`, and close."""
        self._thread.result(self._flush(limit_s), limit_s + 1.0)

    def joined(self, gateway_id: str, link: FramedLink[ToWorker]) -> None:
        """A gateway said hello on `link`."""
        replaced = self._links.pop(gateway_id, None)
        if replaced is not None:
            self._deliver(GatewayLost(gateway_id))
            replaced.close()
        # First of all: from then on other threads may write to it.
        link.write(encode_frame(self._greeting))
        self._links[gateway_id] = link
        self._has_gateway.set()
        self._deliver(GatewayJoined(gateway_id))

    def received(self, message: FromGateway) -> None:
        """A gateway asked for something."""
        self._deliver(message)

    def left(self, gateway_id: str, link: FramedLink[ToWorker]) -> None:
        """A link is closed."""
        if self._links.get(gateway_id) is link:
            del self._links[gateway_id]
            self._deliver(GatewayLost(gateway_id))

    async def _listen(self, socket_path: str) -> None:
        listener = listen_unix(socket_path)
        await self._thread.loop.create_unix_server(lambda: self._new_link(None)[0], sock=listener)

    def _spawn(self, joiner: GatewayJoiner) -> None:
        self._thread.spawn(joiner.run())

    def _new_link(
        self, handshake: LinkHandshake | None
    ) -> tuple[FramedLink[ToWorker], asyncio.Future[str]]:
        link = FramedLink(
            self._thread.loop, worker_side_decoder(), handshake, self._max_unread_bytes
        )
        handler = _GatewayHandler(self, link, self._thread.loop.create_future())
        link.attach(handler)
        return link, handler.ended

    def _announce(self, state: Loading | Ready | Failed) -> None:
        self._greeting = state
        self._write_all(encode_frame(state))

    def _say_alive(self, step: Callable[[], int]) -> None:
        self._write_all(encode_frame(Alive(step())))
        self._thread.loop.call_later(ALIVE_PERIOD_S, self._say_alive, step)

    def _write_all(self, frame: bytes) -> None:
        for link in list(self._links.values()):
            link.write(frame)

    async def _flush(self, limit_s: float) -> None:
        deadline_s = self._thread.loop.time() + limit_s
        while any(link.unread_bytes for link in self._links.values()):
            if self._thread.loop.time() > deadline_s:
                break
            await asyncio.sleep(0.01)
        for link in list(self._links.values()):
            link.close()


class _GatewayHandler:
    """One gateway's link: its hello, then its commands."""

    def __init__(
        self, links: GatewayLinks, link: FramedLink[ToWorker], ended: asyncio.Future[str]
    ) -> None:
        self.ended = ended
        """Why the link closed; empty when it had been in use."""
        self._links = links
        self._link = link
        self._gateway_id: str | None = None

    def opened(self) -> None:
        """The gateway speaks first, and soon."""
        self.ended.get_loop().call_later(HANDSHAKE_LIMIT_S, self._check_hello)

    def received(self, message: ToWorker) -> None:
        """Hand over what a gateway says after its hello."""
        if isinstance(message, Hello):
            if message.protocol_version != PROTOCOL_VERSION:
                self._refuse(message)
                return
            self._gateway_id = message.gateway_id
            self._links.joined(message.gateway_id, self._link)
        elif self._gateway_id is None:
            raise FrameError("the first message was no hello")
        else:
            self._links.received(FromGateway(self._gateway_id, message))

    def closed(self, reason: str) -> None:
        """Report a gateway that had introduced itself."""
        if self._gateway_id is not None:
            self._links.left(self._gateway_id, self._link)
        if not self.ended.done():
            self.ended.set_result("" if self._gateway_id is not None else reason)

    def _check_hello(self) -> None:
        if self._gateway_id is None and not self.ended.done():
            self._link.abort("the gateway did not introduce itself")

    def _refuse(self, hello: Hello) -> None:
        reason = (
            f"this worker speaks protocol {PROTOCOL_VERSION}, the gateway {hello.protocol_version}"
        )
        self._link.write(encode_frame(Failed(reason)))
        self._link.close(reason)
