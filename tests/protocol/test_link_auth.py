import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinfire.protocol.link_auth import (
    HANDSHAKE_BYTES,
    HELLO_BYTES,
    LINK_VERSION,
    AuthError,
    LinkHandshake,
)

SECRET = b"the secret of this cluster"
SECRETS = st.sampled_from([None, SECRET])
CUTS = st.lists(st.integers(1, 50), max_size=30)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    parts, start = [], 0
    for size in cuts:
        parts.append(data[start : start + size])
        start += size
    return [part for part in [*parts, data[start:]] if part]


def feed_all(end: LinkHandshake, parts: list[bytes]) -> None:
    for part in parts:
        end.feed(part)


class End:
    """One end with what it has received, sent and got past the handshake."""

    def __init__(self, secret: bytes | None, *, initiator: bool) -> None:
        self.handshake = LinkHandshake(secret, initiator=initiator)
        self.outbox = self.handshake.start()
        self.done = False
        self.rest = b""

    def receive(self, data: bytes, cuts: list[int]) -> None:
        for piece in pieces(data, cuts):
            if self.done:
                self.rest += piece
                continue
            step = self.handshake.feed(piece)
            self.outbox += step.to_send
            self.done, self.rest = step.done, step.rest

    def take_outbox(self) -> bytes:
        data, self.outbox = self.outbox, b""
        return data


def connect(
    left: bytes | None, right: bytes | None, cuts: list[int], tail: bytes = b""
) -> tuple[End, End]:
    client, server = End(left, initiator=True), End(right, initiator=False)
    for _ in range(2):
        server.receive(client.take_outbox(), cuts)
        client.receive(server.take_outbox() + (tail if server.done else b""), cuts)
    return client, server


@given(SECRETS, CUTS, st.binary(max_size=100))
def test_ends_with_the_same_secret_open_the_link_however_bytes_are_cut(
    secret: bytes | None, cuts: list[int], tail: bytes
) -> None:
    client, server = connect(secret, secret, cuts, tail)
    assert client.done
    assert server.done
    assert server.rest == b""
    assert tail.startswith(client.rest) or client.rest.startswith(tail)
    if secret is not None:
        assert client.rest == tail


@pytest.mark.parametrize("initiator", [True, False])
def test_another_secret_is_refused_by_both_ends(initiator: bool) -> None:
    secrets = (SECRET, b"another cluster's secret")
    client, server = (
        LinkHandshake(secret, initiator=is_client)
        for secret, is_client in zip(secrets, (True, False), strict=True)
    )
    client_hello, server_hello = client.start(), server.start()
    client_proof = client.feed(server_hello).to_send
    server.feed(client_hello)
    if initiator:
        with pytest.raises(AuthError, match="does not know this cluster's secret"):
            client.feed(b"\x01" * 32)
    else:
        with pytest.raises(AuthError, match="does not know this cluster's secret") as caught:
            server.feed(client_proof)
        assert SECRET.decode() not in str(caught.value)
        with pytest.raises(AuthError):
            server.feed(b"more")


@pytest.mark.parametrize(
    ("left", "right", "client_says", "server_says"),
    [
        (SECRET, None, "other one has none", "this one has none"),
        (None, SECRET, "this one has none", "other one has none"),
    ],
)
def test_a_secret_on_one_end_only_fails_on_both(
    left: bytes | None, right: bytes | None, client_says: str, server_says: str
) -> None:
    client, server = LinkHandshake(left, initiator=True), LinkHandshake(right, initiator=False)
    with pytest.raises(AuthError, match=client_says):
        client.feed(server.start())
    with pytest.raises(AuthError, match=server_says):
        server.feed(client.start())


def test_another_version_is_named() -> None:
    client, server = (LinkHandshake(SECRET, initiator=first) for first in (True, False))
    hello = bytearray(server.start())
    hello[4] = LINK_VERSION + 6
    with pytest.raises(AuthError, match=f"version {LINK_VERSION + 6} .* this one {LINK_VERSION}"):
        client.feed(bytes(hello))


def test_what_an_end_sent_does_not_fit_when_it_comes_back() -> None:
    for initiator in (True, False):
        end = LinkHandshake(SECRET, initiator=initiator)
        with pytest.raises(AuthError, match="own part of the handshake"):
            end.feed(end.start())


def test_a_nonce_sent_back_under_the_other_role_is_refused() -> None:
    client = LinkHandshake(SECRET, initiator=True)
    reflected = bytearray(client.start())
    reflected[5] = 2
    with pytest.raises(AuthError, match="own part of the handshake"):
        client.feed(bytes(reflected))


def test_a_proof_sent_back_to_its_maker_is_refused() -> None:
    client, server = (LinkHandshake(SECRET, initiator=first) for first in (True, False))
    proof = client.feed(server.start()).to_send
    with pytest.raises(AuthError, match="does not know"):
        client.feed(proof)


def test_a_recorded_proof_does_not_open_the_next_link() -> None:
    client, server = (LinkHandshake(SECRET, initiator=first) for first in (True, False))
    recorded = client.start() + client.feed(server.start()).to_send
    assert server.feed(recorded).done
    with pytest.raises(AuthError, match="does not know"):
        LinkHandshake(SECRET, initiator=False).feed(recorded)


def test_a_responder_proves_nothing_to_a_stranger() -> None:
    server = LinkHandshake(SECRET, initiator=False)
    step = server.feed(LinkHandshake(b"x" * 20, initiator=True).start())
    assert step.to_send == b""
    assert not step.done


def test_a_changed_hello_is_noticed() -> None:
    """Whoever sits between the ends cannot change what either believes the other said."""
    client, server = (LinkHandshake(SECRET, initiator=first) for first in (True, False))
    changed = bytearray(client.start())
    changed[7] ^= 1  # The padding byte, which nobody reads.
    proof = client.feed(server.start()).to_send
    server.feed(bytes(changed))
    with pytest.raises(AuthError, match="does not know"):
        server.feed(proof)


@given(st.binary(max_size=4000), SECRETS, st.booleans(), CUTS)
def test_garbage_never_opens_a_link_nor_breaks_an_end(
    garbage: bytes, secret: bytes | None, initiator: bool, cuts: list[int]
) -> None:
    end = LinkHandshake(secret, initiator=initiator)
    try:
        for piece in pieces(garbage, cuts):
            assert not end.feed(piece).done
            assert len(end._unread) < HELLO_BYTES
    except AuthError:
        pass


@given(st.binary(min_size=HANDSHAKE_BYTES - 5, max_size=2000), st.booleans(), CUTS)
def test_garbage_behind_a_good_beginning_is_refused_within_the_handshake(
    garbage: bytes, initiator: bool, cuts: list[int]
) -> None:
    end = LinkHandshake(SECRET, initiator=initiator)
    end.feed(LinkHandshake(SECRET, initiator=not initiator).start())
    with pytest.raises(AuthError):
        feed_all(end, pieces(garbage, cuts))


def test_a_close_is_explained() -> None:
    client = LinkHandshake(SECRET, initiator=True)
    assert "before the other end said anything" in str(client.closed())
    client.feed(LinkHandshake(SECRET, initiator=False).start())
    assert "secrets differ" in str(client.closed())


def test_an_empty_secret_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="empty"):
        LinkHandshake(b"", initiator=True)
