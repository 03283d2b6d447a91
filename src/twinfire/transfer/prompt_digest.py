"""A digest of the tokens that a hand-off is about, against mixed-up requests."""

from __future__ import annotations

import struct
from hashlib import sha256

from twinfire.protocol.messages import Submit

_LENGTH = struct.Struct("<Q")


def prompt_digest(submit: Submit) -> bytes:
    """Return sha256 over the prompt, the cache salt and what each choice has output already."""
    digest = sha256()
    salt = submit.cache_salt.encode("utf-8", "surrogatepass")
    for part in (submit.prompt, salt, repr(submit.choices).encode(), *submit.outputs):
        digest.update(_LENGTH.pack(len(part)))
        digest.update(part)
    return digest.digest()
