"""What nobody of this cluster sends: it costs its sender the link, and nobody else anything."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.array_memory import SMALL, ArrayMemory
from support.connector_ends import LOOPBACK, SECRET, End, MakeEnd, first_life
from twinfire.protocol.addresses import TcpAddress, parse_address
from twinfire.protocol.messages import Peer
from twinfire.protocol.worker_config import ConnectorKind
from twinfire.transfer.data_link import (
    DATA_VERSION,
    LinkHello,
    LinkSecurity,
    accept_link,
    layout_text,
    open_link,
)
from twinfire.transfer.data_stream import DataStream, StreamEnded
from twinfire.transfer.data_wire import (
    CONFIRMED,
    CONTENT,
    FAULT,
    STALE,
    ConfirmRequest,
    ReadRequest,
    max_blocks_per_request,
    send_message,
)
from twinfire.transfer.waker import Waker

SECURITY = LinkSecurity.of(SECRET, None)
IDS = struct.pack("<2I", 0, 1)
GENERATIONS = struct.pack("<2q", 1, 1)
LIMIT = max_blocks_per_request(SMALL)

HOSTILE_REQUESTS = {
    "no blocks": ReadRequest(0, 0, b"", b""),
    "half an id": ReadRequest(0, 0, IDS[:3], GENERATIONS[:8]),
    "too few generations": ReadRequest(0, 0, IDS, GENERATIONS[:8]),
    "too many generations": ReadRequest(0, 0, IDS[:4], GENERATIONS),
    "no such block": ReadRequest(0, 0, struct.pack("<I", 4), GENERATIONS[:8]),
    "a huge block id": ReadRequest(0, 0, b"\xff" * 4, GENERATIONS[:8]),
    "no such place": ReadRequest(0, 9, IDS, GENERATIONS),
    "a negative place": ReadRequest(0, -1, IDS, GENERATIONS),
    "a negative request": ReadRequest(-1, 0, IDS, GENERATIONS),
    "too many blocks": ReadRequest(0, 0, IDS * LIMIT, GENERATIONS * LIMIT),
    "confirmation of no place": ConfirmRequest(0, 77),
}


def hello(kind: str, name: str, meant: str) -> LinkHello:
    return LinkHello(DATA_VERSION, kind, name, meant, layout_text(SMALL))


@contextlib.contextmanager
def member_link(kind: ConnectorKind, peer: Peer) -> Iterator[DataStream]:
    """A link of somebody who knows the secret and then misbehaves."""
    address = parse_address(peer.data)
    waker = Waker()
    greeting = hello(kind, "hostile", peer.instance_id)
    stream, _ = open_link(address, SECURITY, greeting, waker, 5.0)
    try:
        yield stream
    finally:
        stream.close()
        waker.close()


def assert_cut(stream: DataStream) -> None:
    with contextlib.suppress(StreamEnded):
        assert stream.receive_some(100) == b""


def assert_serves(make_end: MakeEnd, there: End) -> None:
    here = make_end(ArrayMemory(4), name=os.urandom(4).hex())
    assert here.read(there.peer, first_life(range(4))).wait() is None


@pytest.mark.parametrize("what", HOSTILE_REQUESTS)
def test_a_hostile_request_ends_its_link_only(
    make_end: MakeEnd, kind: ConnectorKind, what: str
) -> None:
    there = make_end(ArrayMemory(4).fill(), name="there")
    with member_link(kind, there.peer) as stream:
        send_message(stream, HOSTILE_REQUESTS[what])
        assert_cut(stream)
    assert_serves(make_end, there)


def test_hostile_messages_end_their_link_only(make_end: MakeEnd, kind: ConnectorKind) -> None:
    there = make_end(ArrayMemory(4).fill(), name="there")
    body = msgspec.msgpack.encode(["read", 0, 0, IDS, GENERATIONS])
    for message in (
        b"\xff\xff\xff\xff",
        struct.pack("<I", 5) + b"\xc1" * 5,
        struct.pack("<I", 3) + msgspec.msgpack.encode(["x"]) + b"\0",
        struct.pack("<I", 2000) + b"\x91" * 2000,
        struct.pack("<I", len(body)) + b"\xc1" + body[1:],
    ):
        with member_link(kind, there.peer) as stream:
            stream.send(message)
            assert_cut(stream)
    assert_serves(make_end, there)


@pytest.fixture
def here_and_there(make_end: MakeEnd) -> tuple[End, End]:
    return make_end(ArrayMemory(4)), make_end(ArrayMemory(4).fill(), name="there")


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.binary(min_size=1, max_size=300))
def test_garbage_of_a_member_is_harmless(
    here_and_there: tuple[End, End], kind: ConnectorKind, garbage: bytes
) -> None:
    here, there = here_and_there
    with member_link(kind, there.peer) as stream:
        stream.send(garbage)
    assert here.read(there.peer, first_life(range(4))).wait() is None


def test_strangers_learn_nothing_and_use_up_nothing(make_end: MakeEnd) -> None:
    there = make_end(ArrayMemory(4).fill(), name="there")
    address = parse_address(there.peer.data)
    assert isinstance(address, TcpAddress)
    strangers = []
    for opening in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(5000), b"TwFi" + b"\x01" * 400):
        stranger = socket.create_connection((address.host, address.port), 5)
        stranger.sendall(opening)
        strangers.append(stranger)
    assert_serves(make_end, there)
    for stranger in strangers[1:]:
        stranger.settimeout(5)
        heard = b""
        with contextlib.suppress(ConnectionResetError):
            while data := stranger.recv(100):
                heard += data
        assert len(heard) <= 40, "a stranger heard more than the hello"
    for stranger in strangers:
        stranger.close()


class FalsePeer:
    """Knows the secret, introduces itself properly, and then answers with `reply`."""

    def __init__(self, kind: ConnectorKind, offer: bytes, reply: bytes) -> None:
        self._listener = socket.create_server((LOOPBACK.host, 0))
        self.peer = Peer("there", "", f"tcp:127.0.0.1:{self._listener.getsockname()[1]}")
        self._answer = msgspec.structs.replace(hello(kind, "there", ""), data=offer)
        self._reply = reply
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        connected, _ = self._listener.accept()
        waker = Waker()
        stream = DataStream(connected, waker, 5.0)
        with contextlib.suppress(StreamEnded):
            accept_link(stream, SECURITY, lambda: self._answer, tls=False)
            stream.wait_readable()
            stream.send(self._reply)
            while stream.receive_some(1000):
                pass
        stream.close()
        waker.close()

    def close(self) -> None:
        self._thread.join(10)
        self._listener.close()


def reply(request_id: int, status: int, num_bytes: int, body: bytes = b"") -> bytes:
    return struct.pack("<QII", request_id, status, num_bytes) + body


@pytest.mark.parametrize(
    "hostile_reply",
    [
        reply(1, CONTENT, SMALL.bytes_per_block),
        reply(0, CONTENT, 2**32 - 1),
        reply(0, CONTENT, SMALL.bytes_per_block - 1),
        reply(0, CONFIRMED, 0),
        reply(0, 77, 0),
        reply(0, STALE, 2**32 - 1),
        reply(0, FAULT, 5000),
    ],
    ids=["other request", "huge", "short", "unasked", "unknown", "long reason", "longer reason"],
)
def test_a_hostile_reply_fails_the_read_and_changes_nothing(
    make_end: MakeEnd, kind: ConnectorKind, hostile_reply: bytes
) -> None:
    here = make_end(ArrayMemory(4), timeout_s=2)
    offer = b""
    if kind == "nixl":
        offer = honest_offer(make_end(ArrayMemory(4).fill(), name="there"))
    false = FalsePeer(kind, offer, hostile_reply)
    try:
        failure = here.read(false.peer, first_life([0])).wait()
        assert failure is not None
        assert not here.memory.imports
        assert not here.memory.words.any()
    finally:
        here.connector.forget("there")
        false.close()


def honest_offer(there: End) -> bytes:
    """What a NIXL end says of itself, to be repeated by an impostor."""
    waker = Waker()
    greeting = hello("nixl", "curious", there.peer.instance_id)
    stream, answer = open_link(parse_address(there.peer.data), SECURITY, greeting, waker, 5.0)
    stream.close()
    waker.close()
    return answer.data


@pytest.mark.parametrize("kind", ["nixl"], indirect=True)
@pytest.mark.parametrize("offer", [b"", b"garbage", msgspec.msgpack.encode([b"garbage", 5])])
def test_nixl_metadata_that_makes_no_sense_fails_the_read(
    make_end: MakeEnd, kind: ConnectorKind, offer: bytes
) -> None:
    here = make_end(ArrayMemory(4), timeout_s=2)
    false = FalsePeer(kind, offer, b"")
    failure = here.read(false.peer, first_life([0])).wait()
    here.connector.forget("there")
    false.close()
    assert failure is not None
    assert "NIXL" in str(failure)
    there = make_end(ArrayMemory(4).fill(), name="honest")
    assert here.read(there.peer, first_life([0])).wait() is None
