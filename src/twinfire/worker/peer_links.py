"""Links to other workers: those that this worker dialled, and those that it accepted.

A link is good only between two ends with one fingerprint, and a dialled one only with the process
that was meant: a later one at the same address is another peer. Each direction is a `Peers` of its
own, so that a message's link says whether its sender computes, holds, decodes or pulls.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Literal

from twinfire.protocol.addresses import parse_address
from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.framing import FrameError, encode_frame, peer_decoder
from twinfire.protocol.messages import Peer
from twinfire.protocol.peer_messages import PEER_PROTOCOL_VERSION, PeerHello, PeerMessage
from twinfire.worker.framed_link import HANDSHAKE_LIMIT_S, FramedLink
from twinfire.worker.inbox import FromPeer, PeerLost
from twinfire.worker.link_security import LinkSecurity
from twinfire.worker.link_thread import LinkThread

MAX_FRAMES_BEFORE_HELLO = 10_000
"""What may wait for a link that is being opened."""

Direction = Literal["dialled", "accepted"]
Deliver = Callable[[FromPeer | PeerLost], None]

log = logging.getLogger(__name__)


class PeerLinks:
    """The links of one direction, by the other worker's instance. A `Peers` for any thread."""

    def __init__(
        self,
        thread: LinkThread,
        hello: PeerHello,
        security: LinkSecurity,
        deliver: Deliver,
        direction: Direction,
    ) -> None:
        self._thread = thread
        self._hello = hello
        self._security = security
        self._deliver = deliver
        self._dialled = direction == "dialled"
        self._links: dict[str, _PeerLink] = {}
        self._waiting: dict[str, list[bytes]] = {}
        """Frames for peers that are being dialled."""

    def connect(self, peer: Peer) -> None:
        """Make sure that there is a link; a failure is reported as its loss."""
        self._thread.call(lambda: self._connect(peer))

    def send(self, instance_id: str, message: PeerMessage) -> None:
        """Send, or drop the message when there is no link."""
        frame = encode_frame(message)
        self._thread.call(lambda: self._write(instance_id, frame))

    def drop(self, instance_id: str, reason: str) -> None:
        """Close the link to a peer and report it as lost."""
        self._thread.call(lambda: self._drop(instance_id, reason))

    def cut(self) -> None:
        """Close all links, as a broken network would; waits until they are."""
        self._thread.result(self._cut())

    def accept(self) -> FramedLink[PeerMessage]:
        """Return the protocol of a connection that somebody opens; on the loop."""
        return self._new_link(initiator=False, expected=None).framed

    def opened(self, peer: Peer, link: _PeerLink) -> None:
        """The other end has said who it is, and may be talked to."""
        replaced = self._links.pop(peer.instance_id, None)
        if replaced is not None:
            self._deliver(PeerLost(peer.instance_id, "it opened another link", self._dialled))
            replaced.framed.abort("replaced by a newer link")
        self._links[peer.instance_id] = link
        for frame in self._waiting.pop(peer.instance_id, []):
            link.framed.write(frame)

    def received(self, peer: Peer, message: PeerMessage) -> None:
        """A peer says something."""
        self._deliver(FromPeer(peer, message, self._dialled))

    def left(self, instance_id: str, link: _PeerLink, reason: str) -> None:
        """A link is closed, or could not be opened."""
        if self._links.get(instance_id) is link:
            del self._links[instance_id]
        elif self._waiting.pop(instance_id, None) is None or not self._dialled:
            return
        log.info("a link with worker %s is gone: %s", instance_id, reason)
        self._deliver(PeerLost(instance_id, reason, self._dialled))

    def _connect(self, peer: Peer) -> None:
        if peer.instance_id not in self._links and peer.instance_id not in self._waiting:
            self._waiting[peer.instance_id] = []
            self._thread.spawn(self._dial(peer))

    async def _dial(self, peer: Peer) -> None:
        link = self._new_link(initiator=True, expected=peer)
        try:
            await self._security.connect(parse_address(peer.control), lambda: link.framed)
        except TimeoutError:
            self.left(peer.instance_id, link, f"{peer.control} does not answer")
        except OSError as error:
            self.left(peer.instance_id, link, f"{peer.control}: {error.strerror or error}")
        except InvalidRequest as error:
            self.left(peer.instance_id, link, error.message)

    def _new_link(self, *, initiator: bool, expected: Peer | None) -> _PeerLink:
        handshake = self._security.handshake(initiator=initiator)
        framed = FramedLink(self._thread.loop, peer_decoder(), handshake)
        link = _PeerLink(self, framed, self._hello, expected, self._thread.loop)
        framed.attach(link)
        return link

    def _write(self, instance_id: str, frame: bytes) -> None:
        link = self._links.get(instance_id)
        if link is not None:
            link.framed.write(frame)
        elif len(waiting := self._waiting.get(instance_id, [])) < MAX_FRAMES_BEFORE_HELLO:
            waiting.append(frame)

    def _drop(self, instance_id: str, reason: str) -> None:
        link = self._links.get(instance_id)
        if link is not None:
            self.left(instance_id, link, reason)
            link.framed.abort(reason)

    async def _cut(self) -> None:
        for instance_id in list(self._links):
            self._drop(instance_id, "the link was cut")


class _PeerLink:
    """One connection with another worker."""

    def __init__(
        self,
        links: PeerLinks,
        framed: FramedLink[PeerMessage],
        hello: PeerHello,
        expected: Peer | None,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.framed = framed
        self._links = links
        self._hello = hello
        self._expected = expected
        self._loop = loop
        self._peer: Peer | None = None

    def opened(self) -> None:
        """Say who this is, and expect the same soon."""
        self.framed.write(encode_frame(self._hello))
        self._loop.call_later(HANDSHAKE_LIMIT_S, self._check_hello)

    def received(self, message: PeerMessage) -> None:
        """Hand over what comes after the hello."""
        if isinstance(message, PeerHello):
            self._greet(message)
        elif self._peer is None:
            raise FrameError("the first message was no hello")
        else:
            self._links.received(self._peer, message)

    def closed(self, reason: str) -> None:
        """Report who is gone."""
        peer = self._peer or self._expected
        if peer is not None:
            self._links.left(peer.instance_id, self, reason)

    def _greet(self, hello: PeerHello) -> None:
        if self._peer is not None:
            raise FrameError("a second hello")
        problem = self._problem(hello)
        if problem is not None:
            raise FrameError(problem)
        self._peer = hello.peer
        self._links.opened(hello.peer, self)

    def _problem(self, hello: PeerHello) -> str | None:
        if hello.protocol_version != PEER_PROTOCOL_VERSION:
            return f"the other worker speaks protocol {hello.protocol_version}"
        if self._expected is not None and hello.peer.instance_id != self._expected.instance_id:
            return "another process than the one that was meant listens there now"
        if not hello.fingerprint.matches(self._hello.fingerprint):
            return f"the other worker's fingerprint differs: {hello.fingerprint}"
        return None

    def _check_hello(self) -> None:
        if self._peer is None:
            self.framed.abort("the other worker did not introduce itself")
