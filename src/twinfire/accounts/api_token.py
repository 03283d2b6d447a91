"""API tokens: shown once when they are made, kept as a digest only.

A token is `tf_`, 43 random characters (256 bits) and 6 of their checksum, so that a mistyped or
made-up one is refused without asking the database. With 256 random bits one SHA-256 is as good as a
slow hash: there is nothing to guess.
"""

from __future__ import annotations

import secrets
import zlib
from dataclasses import dataclass
from hashlib import sha256

PREFIX = "tf_"
_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_RANDOM_CHARS = 43
_CHECKSUM_CHARS = 6
_SHOWN_CHARS = 11
"""`tf_` and 8 more: enough to tell tokens apart, 208 bits short of using one."""


@dataclass(frozen=True, slots=True)
class ApiToken:
    """What is kept of a token."""

    id: str
    account_id: str
    name: str
    shown_prefix: str
    """How lists show it."""
    created_s: float
    expires_s: float | None = None
    revoked_s: float | None = None

    def is_live(self, now_s: float) -> bool:
        """Whether it opens anything at `now_s`, Unix time."""
        return self.revoked_s is None and (self.expires_s is None or now_s < self.expires_s)


def new_token() -> str:
    """Return a new secret token."""
    body = "".join(secrets.choice(_ALPHABET) for _ in range(_RANDOM_CHARS))
    return PREFIX + body + _checksum(body)


def token_digest(token: str) -> bytes:
    """Return what is kept of a token, 32 bytes."""
    return sha256(token.encode("utf-8", "surrogatepass")).digest()


def shown_prefix(token: str) -> str:
    """Return the part of a token that may be shown."""
    return token[:_SHOWN_CHARS]


def is_well_formed(token: str) -> bool:
    """Whether `token` can be one of ours."""
    if not token.startswith(PREFIX) or len(token) != len(PREFIX) + _RANDOM_CHARS + _CHECKSUM_CHARS:
        return False
    body = token[len(PREFIX) : -_CHECKSUM_CHARS]
    return token.isascii() and token[-_CHECKSUM_CHARS:] == _checksum(body)


def _checksum(body: str) -> str:
    number = zlib.crc32(body.encode("ascii", "replace"))
    digits = ""
    for _ in range(_CHECKSUM_CHARS):
        number, digit = divmod(number, len(_ALPHABET))
        digits += _ALPHABET[digit]
    return digits
