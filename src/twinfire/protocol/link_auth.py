"""Both ends of a link prove that they know the cluster's secret, before anything else is said.

Each sends a hello with a fresh nonce. The initiator proves first, so that the responder never
computes a proof for a stranger; a proof is HMAC-SHA256 over the prover's role and both hellos, so
that neither a recorded proof nor one sent back to its maker fits. Knows nothing of sockets. This
says who is at the other end when the link begins; only TLS keeps others off it afterwards.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass

from twinfire.protocol.errors import TwinfireError

LINK_VERSION = 1
"""Raised whenever the handshake changes; an end of another version is refused."""

_HELLO = struct.Struct("<4sBBBx32s")  # Magic, version, role, whether a proof is wanted, nonce.
_MAGIC = b"TwFi"
_INITIATOR, _RESPONDER = 1, 2
_PROOF_CONTEXT = b"twinfire link proof"
_PROOF_BYTES = hashlib.sha256().digest_size
HELLO_BYTES = _HELLO.size
HANDSHAKE_BYTES = HELLO_BYTES + _PROOF_BYTES
"""All that an end with a secret sends; one without sends its hello only."""


class AuthError(TwinfireError):
    """The other end is not one to talk to; the message says why and nothing secret."""


@dataclass(frozen=True, slots=True)
class HandshakeStep:
    """What to do after bytes were fed."""

    to_send: bytes
    """Goes out before anything else, also when `done`."""
    done: bool
    """Whether the other end has proved itself and the link is open."""
    rest: bytes
    """What came behind the handshake; empty before it is done."""


class LinkHandshake:
    """One end's side of the handshake; never holds more than `HELLO_BYTES` of what it was fed.

    A secret of None opens only to an end that has none either. After an AuthError the link must be
    closed; feeding it goes on raising.
    """

    def __init__(self, secret: bytes | None, *, initiator: bool) -> None:
        if secret is not None and not secret:
            raise ValueError("an empty secret proves nothing")
        self._secret = secret
        self._initiator = initiator
        self._role = _INITIATOR if initiator else _RESPONDER
        self._peer_role = _RESPONDER if initiator else _INITIATOR
        self._nonce = secrets.token_bytes(32)
        self._hello = _HELLO.pack(_MAGIC, LINK_VERSION, self._role, secret is not None, self._nonce)
        self._peer_hello: bytes | None = None
        self._unread = b""
        self._done = False
        self._failure: AuthError | None = None

    def start(self) -> bytes:
        """Return what this end sends first."""
        return self._hello

    def feed(self, data: bytes) -> HandshakeStep:
        """Take received bytes, cut in any way; AuthError when the link must not open."""
        if self._failure is not None:
            raise self._failure
        if self._done:
            raise RuntimeError("the handshake is done; what follows is not its to read")
        try:
            return self._advance(self._unread + data)
        except AuthError as error:
            self._failure = error
            self._unread = b""
            raise

    def closed(self) -> AuthError:
        """Return why the other end may have closed the link before the handshake was done."""
        if self._peer_hello is None:
            return AuthError("the link closed before the other end said anything")
        return AuthError(
            "the other end closed the link during the handshake, as it does when the secrets differ"
        )

    def _advance(self, received: bytes) -> HandshakeStep:
        to_send = b""
        if self._peer_hello is None:
            self._check_magic(received)
            if len(received) < HELLO_BYTES:
                return self._wait(received, to_send)
            self._peer_hello, received = received[:HELLO_BYTES], received[HELLO_BYTES:]
            self._check_hello(self._peer_hello)
            if self._secret is None:
                return self._finish(received, to_send)
            if self._initiator:
                to_send = self._proof(self._role)
        if len(received) < _PROOF_BYTES:
            return self._wait(received, to_send)
        if not hmac.compare_digest(received[:_PROOF_BYTES], self._proof(self._peer_role)):
            raise AuthError("the other end does not know this cluster's secret")
        if not self._initiator:
            to_send = self._proof(self._role)
        return self._finish(received[_PROOF_BYTES:], to_send)

    def _check_magic(self, received: bytes) -> None:
        if not _MAGIC.startswith(received[: len(_MAGIC)]):
            raise AuthError("the other end does not speak Twinfire's links")

    def _check_hello(self, hello: bytes) -> None:
        _, version, role, has_secret, nonce = _HELLO.unpack(hello)
        if version != LINK_VERSION:
            raise AuthError(
                f"the other end speaks version {version} of the link, this one {LINK_VERSION}"
            )
        if role == self._role or hmac.compare_digest(nonce, self._nonce):
            raise AuthError("the other end sent this end's own part of the handshake back")
        if role != self._peer_role or has_secret not in (0, 1):
            raise AuthError("the other end sent a malformed hello")
        if has_secret and self._secret is None:
            raise AuthError("the other end has a cluster secret and this one has none")
        if not has_secret and self._secret is not None:
            raise AuthError("this end has a cluster secret and the other one has none")

    def _proof(self, prover: int) -> bytes:
        assert self._secret is not None
        assert self._peer_hello is not None
        ours_first = (self._hello, self._peer_hello)
        initiator_hello, responder_hello = ours_first if self._initiator else ours_first[::-1]
        message = _PROOF_CONTEXT + bytes([prover]) + initiator_hello + responder_hello
        return hmac.digest(self._secret, message, "sha256")

    def _wait(self, received: bytes, to_send: bytes) -> HandshakeStep:
        self._unread = received
        return HandshakeStep(to_send, done=False, rest=b"")

    def _finish(self, rest: bytes, to_send: bytes) -> HandshakeStep:
        self._unread = b""
        self._done = True
        return HandshakeStep(to_send, done=True, rest=rest)
