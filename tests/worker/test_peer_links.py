"""Links between workers: real sockets, every way in which the other end may be wrong."""

from __future__ import annotations

import queue
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from support.tls_files import GATEWAY, STRANGER, WORKER
from twinfire.protocol.addresses import parse_address
from twinfire.protocol.messages import Fingerprint, Peer
from twinfire.protocol.peer_messages import (
    PEER_PROTOCOL_VERSION,
    HandOffKey,
    Open,
    PeerHello,
    Ticket,
)
from twinfire.worker.inbox import FromPeer, PeerLost
from twinfire.worker.link_security import LinkSecurity
from twinfire.worker.link_thread import LinkThread
from twinfire.worker.peer_links import PeerLinks

FINGERPRINT = Fingerprint("weights", "bf16", ("target:1:1:16:bf16",), 32, "1")
SECURITY = LinkSecurity(b"a secret of this test alone")
KEY = HandOffKey("g", 1, 0)


class End:
    """One worker's links and what it has heard."""

    def __init__(
        self,
        thread: LinkThread,
        name: str,
        address: str,
        security: LinkSecurity = SECURITY,
        **hello: object,
    ) -> None:
        self.heard: queue.SimpleQueue[FromPeer | PeerLost] = queue.SimpleQueue()
        self.bound = security.bind(parse_address(address)) if address else None
        control = str(self.bound.address) if self.bound else ""
        self.peer = Peer(name, control, f"data of {name}")
        own = PeerHello(PEER_PROTOCOL_VERSION, self.peer, FINGERPRINT)
        own = msgspec.structs.replace(own, **hello)
        self.dialled = PeerLinks(thread, own, security, self.heard.put, "dialled")
        self.accepted = PeerLinks(thread, own, security, self.heard.put, "accepted")
        if self.bound is not None:
            thread.result(self.bound.serve(self.accepted.accept))

    def next(self) -> FromPeer | PeerLost:
        return self.heard.get(timeout=10)


@pytest.fixture
def thread() -> Iterator[LinkThread]:
    thread = LinkThread()
    thread.start()
    yield thread
    thread.stop()


@pytest.fixture(params=["unix", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"unix:{tmp_path}/peer" if request.param == "unix" else "tcp:127.0.0.1:0"


def test_messages_go_both_ways_and_wait_for_the_link(thread: LinkThread, address: str) -> None:
    decode, prefill = End(thread, "d", address), End(thread, "p", "")
    prefill.dialled.connect(decode.peer)
    prefill.dialled.connect(decode.peer)
    for num_tokens in range(3):
        prefill.dialled.send("d", Open(KEY, num_tokens))
    for num_tokens in range(3):
        assert decode.next() == FromPeer(prefill.peer, Open(KEY, num_tokens), dialled=False)
    decode.accepted.send("p", Ticket(KEY, 0))
    assert prefill.next() == FromPeer(decode.peer, Ticket(KEY, 0), dialled=True)
    decode.accepted.drop("p", "enough")
    assert decode.next() == PeerLost("p", "enough", dialled=False)
    lost = prefill.next()
    assert isinstance(lost, PeerLost)
    assert lost.dialled
    prefill.dialled.send("d", Open(KEY, 9))
    prefill.dialled.connect(decode.peer)
    prefill.dialled.send("d", Open(KEY, 10))
    assert decode.next() == FromPeer(prefill.peer, Open(KEY, 10), dialled=False)


def test_a_cut_is_seen_on_both_ends(thread: LinkThread, address: str) -> None:
    decode, prefill = End(thread, "d", address), End(thread, "p", "")
    prefill.dialled.connect(decode.peer)
    prefill.dialled.send("d", Open(KEY, 1))
    decode.next()
    prefill.dialled.cut()
    assert prefill.next() == PeerLost("d", "the link was cut", dialled=True)
    assert isinstance(decode.next(), PeerLost)


def other_instance(decode: End) -> Peer:
    return Peer("an earlier life", decode.peer.control)


@pytest.mark.parametrize(
    ("hello", "security", "reason"),
    [
        ({}, LinkSecurity(b"another cluster's secret"), "closed"),
        ({}, LinkSecurity(None), "secret"),
        (
            {"fingerprint": msgspec.structs.replace(FINGERPRINT, block_size=16)},
            SECURITY,
            "fingerprint",
        ),
        ({"protocol_version": 99}, SECURITY, "close"),
    ],
    ids=["other secret", "no secret", "other model", "other version"],
)
def test_ends_that_do_not_belong_together(
    thread: LinkThread, address: str, hello: dict, security: LinkSecurity, reason: str
) -> None:
    decode = End(thread, "d", address)
    prefill = End(thread, "p", "", security, **hello)
    prefill.dialled.connect(decode.peer)
    prefill.dialled.send("d", Open(KEY, 1))
    lost = prefill.next()
    assert isinstance(lost, PeerLost)
    assert reason in lost.reason
    assert decode.heard.empty()


def test_a_later_process_at_the_address_is_not_the_one_that_was_meant(
    thread: LinkThread, address: str
) -> None:
    decode, prefill = End(thread, "d", address), End(thread, "p", "")
    prefill.dialled.connect(other_instance(decode))
    prefill.dialled.send("an earlier life", Open(KEY, 1))
    lost = prefill.next()
    assert isinstance(lost, PeerLost)
    assert lost.instance_id == "an earlier life"
    assert "another process" in lost.reason


def test_nobody_there_is_a_loss(thread: LinkThread, tmp_path: Path) -> None:
    prefill = End(thread, "p", "")
    for control in (f"unix:{tmp_path}/nobody", "tcp:127.0.0.1:1", "nonsense"):
        prefill.dialled.connect(Peer("d", control))
        lost = prefill.next()
        assert isinstance(lost, PeerLost)
        assert lost.reason


def test_an_unprotected_link_to_another_host_is_not_opened(thread: LinkThread) -> None:
    prefill = End(thread, "p", "", LinkSecurity(None))
    prefill.dialled.connect(Peer("d", "tcp:192.0.2.1:9"))
    lost = prefill.next()
    assert isinstance(lost, PeerLost)
    assert "secret" in lost.reason


@pytest.mark.parametrize("bytes_sent", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 200, b""])
def test_garbage_closes_its_own_link_only(
    thread: LinkThread, tmp_path: Path, bytes_sent: bytes
) -> None:
    decode, prefill = End(thread, "d", f"unix:{tmp_path}/peer"), End(thread, "p", "")
    prefill.dialled.connect(decode.peer)
    prefill.dialled.send("d", Open(KEY, 1))
    decode.next()
    hostile = socket.socket(socket.AF_UNIX)
    hostile.connect(f"{tmp_path}/peer")
    hostile.sendall(bytes_sent)
    hostile.shutdown(socket.SHUT_WR)
    hostile.settimeout(10)
    while hostile.recv(1000):
        pass
    hostile.close()
    prefill.dialled.send("d", Open(KEY, 2))
    assert decode.next() == FromPeer(prefill.peer, Open(KEY, 2), dialled=False)


def test_garbage_behind_a_good_hello_closes_that_link(thread: LinkThread, address: str) -> None:
    decode, prefill = End(thread, "d", address), End(thread, "p", "")
    prefill.dialled.connect(decode.peer)
    prefill.dialled.send("d", Open(KEY, 1))
    decode.next()
    link = prefill.dialled._links["d"]
    link.framed.write(b"\xff\xff\xff\xff")
    assert isinstance(decode.next(), PeerLost)
    assert isinstance(prefill.next(), PeerLost)


def wait(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_second_link_of_a_peer_replaces_the_first(thread: LinkThread, address: str) -> None:
    decode = End(thread, "d", address)
    first, second = End(thread, "p", ""), End(thread, "p", "")
    first.dialled.connect(decode.peer)
    first.dialled.send("d", Open(KEY, 1))
    decode.next()
    second.dialled.connect(decode.peer)
    second.dialled.send("d", Open(KEY, 2))
    assert decode.next() == PeerLost("p", "it opened another link", dialled=False)
    assert decode.next() == FromPeer(second.peer, Open(KEY, 2), dialled=False)
    assert isinstance(first.next(), PeerLost)


def test_over_tcp_certificates_protect_both_ends(thread: LinkThread) -> None:
    decode = End(thread, "d", "tcp:127.0.0.1:0", LinkSecurity(SECURITY.secret, GATEWAY))
    prefill = End(thread, "p", "", LinkSecurity(SECURITY.secret, WORKER))
    prefill.dialled.connect(decode.peer)
    large = Open(HandOffKey("g" * 300_000, 1, 0), 1)
    for message in (Open(KEY, 1), large, Open(KEY, 2)):
        prefill.dialled.send("d", message)
        assert decode.next() == FromPeer(prefill.peer, message, dialled=False)
    for tls in (None, STRANGER):
        outsider = End(thread, "x", "", LinkSecurity(SECURITY.secret, tls))
        outsider.dialled.connect(decode.peer)
        assert isinstance(outsider.next(), PeerLost)
    assert decode.heard.empty()
