"""API keys that an operator keeps in files, so that they are on no command line and in no log."""

from __future__ import annotations

from pathlib import Path

from twinfire.protocol.errors import InvalidRequest

MAX_KEY_BYTES = 4096


def load_key(path: str | Path, what: str) -> str:
    """Return the key in a file, without white space around it.

    InvalidRequest, which calls the key `what`, when the file cannot be read or has no usable key.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_KEY_BYTES + 1)
    except OSError as error:
        raise InvalidRequest(f"cannot read {what} {path}: {error.strerror}") from None
    if len(content) > MAX_KEY_BYTES:
        raise InvalidRequest(f"{what} {path} is longer than {MAX_KEY_BYTES} bytes")
    key = content.strip()
    # What else there could be does not go into a header.
    if not key or any(byte <= ord(" ") or byte > ord("~") for byte in key):
        raise InvalidRequest(f"{what} {path} must be one word of printable ASCII")
    return key.decode()
