"""Sizes of memory as people write them: 512MiB, 2G, 1.5GB, 1048576."""

from __future__ import annotations

import re

_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", re.IGNORECASE)


def parse_byte_size(text: str) -> int:
    """Return the number of bytes; ValueError that shows the form when `text` is not a size."""
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a size; write 512MiB, 2GiB, 1.5GB or a number of bytes")
    number, unit = match.groups()
    return int(float(number) * _UNITS[(unit or "").lower()])
