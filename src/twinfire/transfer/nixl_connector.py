"""The connector over NIXL, for shared memory copies, RDMA and whatever else NIXL speaks.

The serving end packs blocks into staging memory; the reading end has NIXL read them into staging
memory of its own, unpacks them, and asks over the link whether the serving end still held them. So
only the reader writes the reader's memory, whatever a late or frozen peer does. The link carries
what NIXL must know of the other end, under the cluster's secret; NIXL's own connections are neither
authenticated nor encrypted, so the network between workers must be a trusted one.
"""

from __future__ import annotations

import importlib.util
import logging
import time

import msgspec

from twinfire.cache.kv_group import KvLayout
from twinfire.protocol.addresses import Address
from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.worker_config import TlsFiles
from twinfire.transfer.carrier import CarrierFailed
from twinfire.transfer.connector import Connector, KvMemory
from twinfire.transfer.data_stream import DataStream
from twinfire.transfer.data_wire import CONTENT, WINDOW, send_reply, slot_bytes
from twinfire.transfer.link_connector import READ_TIMEOUT_S, LinkConnector
from twinfire.transfer.nixl_agent import NixlAgent, NixlRead
from twinfire.transfer.nixl_staging import StagingPool, StagingRegion

_CLOSE_TIMEOUT_S = 5.0
_CHECK_S = 0.02
"""Between looks at whether a read that has not ended is still wanted."""

log = logging.getLogger(__name__)


class NixlOffer(msgspec.Struct, frozen=True, array_like=True):
    """Where the serving end of a link puts blocks."""

    metadata: bytes
    address: int
    slot_bytes: int
    """Between two places."""


_OFFER_DECODER = msgspec.msgpack.Decoder(NixlOffer)


class NixlReceiver:
    """The reading end of a link: `WINDOW` places in a region of its own."""

    needs_confirmation = True

    def __init__(
        self, agent: NixlAgent, pool: StagingPool, slot_bytes: int, timeout_s: float
    ) -> None:
        self._agent = agent
        self._pool = pool
        self._slot_bytes = slot_bytes
        self._timeout_s = timeout_s
        self._region = pool.take()
        self._peer: bytes | None = None
        self._peer_address = self._peer_slot_bytes = 0
        self._read: NixlRead | None = None

    def open(self, offer_data: bytes) -> None:
        """Learn where the other end puts blocks."""
        try:
            offer = _OFFER_DECODER.decode(offer_data)
        except msgspec.DecodeError as error:
            raise CarrierFailed(f"the peer's NIXL metadata makes no sense: {error}") from None
        self._peer = self._agent.add_peer(offer.metadata)
        self._peer_address, self._peer_slot_bytes = offer.address, offer.slot_bytes

    def receive(self, stream: DataStream, slot: int, num_bytes: int) -> memoryview:
        """Read what the other end has put into `slot`."""
        assert self._peer is not None
        start = slot * self._slot_bytes
        read = self._read = self._agent.read(
            self._peer,
            self._peer_address + slot * self._peer_slot_bytes,
            self._region.address + start,
            num_bytes,
        )
        give_up_at = time.monotonic() + self._timeout_s
        while not read.wait(_CHECK_S):
            stream.check_wanted()
            if time.monotonic() > give_up_at:
                raise CarrierFailed(f"NIXL brought nothing for {self._timeout_s:g} s")
        if not read.succeeded:
            raise CarrierFailed("NIXL lost the peer")
        return self._region.view[start : start + num_bytes]

    def close(self) -> None:
        """Give the region back as soon as no read can write it any more."""
        pool, region = self._pool, self._region
        if self._read is None:
            pool.give_back(region)
        else:
            self._read.abandon(lambda: pool.give_back(region))
        if self._peer is not None:
            self._agent.drop_peer(self._peer)


class NixlSender:
    """The serving end of a link: blocks stay in their place until the reader has confirmed them."""

    def __init__(self, agent: NixlAgent, pool: StagingPool, slot_bytes: int) -> None:
        self._agent = agent
        self._pool = pool
        self._slot_bytes = slot_bytes
        self._region: StagingRegion = pool.take()
        self._exposed: set[int] = set()
        self.offer_data = msgspec.msgpack.encode(
            NixlOffer(self._region.metadata, self._region.address, slot_bytes)
        )

    def place(self, slot: int, num_bytes: int) -> memoryview:
        """Return where the reader will look."""
        start = slot * self._slot_bytes
        return self._region.view[start : start + num_bytes]

    def send(self, stream: DataStream, request_id: int, slot: int, num_bytes: int) -> None:
        """Let the reader take what has been packed."""
        if slot not in self._exposed:
            self._exposed.add(slot)
            self._agent.expose(1)
        send_reply(stream, request_id, CONTENT, num_bytes)

    def confirmed(self, slot: int) -> None:
        """The reader has what was in the place."""
        if slot in self._exposed:
            self._exposed.remove(slot)
            self._agent.expose(-1)

    def close(self) -> None:
        """Use the region for others; whoever still reads it gets no confirmation."""
        self._agent.expose(-len(self._exposed))
        self._pool.give_back(self._region)


class NixlCarrier:
    """Makes both ends over one agent; implements `Carrier`."""

    name = "nixl"

    def __init__(self, layout: KvLayout, instance_id: str, timeout_s: float) -> None:
        self._slot_bytes = slot_bytes(layout)
        self._timeout_s = timeout_s
        self._agent = NixlAgent(instance_id)
        self._pool = StagingPool(self._agent, WINDOW * self._slot_bytes)

    def new_receiver(self) -> NixlReceiver:
        """Return the reading end of a link; CarrierFailed when there is no room for it."""
        return NixlReceiver(self._agent, self._pool, self._slot_bytes, self._timeout_s)

    def new_sender(self) -> NixlSender:
        """Return the serving end of a link; CarrierFailed when there is no room for it."""
        return NixlSender(self._agent, self._pool, self._slot_bytes)

    def close(self) -> None:
        """End the agent's thread."""
        self._agent.close(_CLOSE_TIMEOUT_S)


def nixl_connector(
    memory: KvMemory,
    *,
    instance_id: str,
    listen: Address,
    secret: bytes | None,
    tls: TlsFiles | None,
    timeout_s: float = READ_TIMEOUT_S,
) -> Connector:
    """Return a connector over NIXL; raises as `LinkConnector` does, InvalidRequest without NIXL."""
    if importlib.util.find_spec("nixl_cu12") is None:
        raise InvalidRequest("NIXL is not installed; pip install 'twinfire[nixl]'")
    if tls is not None:
        log.warning("NIXL sends blocks in the clear; certificates protect its links only")
    carrier = NixlCarrier(memory.kv_layout, instance_id, timeout_s)
    try:
        return LinkConnector(
            memory,
            carrier,
            instance_id=instance_id,
            listen=listen,
            secret=secret,
            tls=tls,
            timeout_s=timeout_s,
        )
    except BaseException:
        carrier.close()
        raise
