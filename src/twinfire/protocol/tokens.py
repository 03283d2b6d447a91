"""Token ids and log-probabilities as packed little-endian arrays.

A link frame carries thousands of token ids; as msgpack integers each would be boxed twice.
Owns the byte layout only: u32 for ids and ranks, f32 for log-probabilities, i64 for block
generations.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

_UINT32 = "I"
_FLOAT32 = "f"
_INT64 = "q"
_ID_BYTES = 4


def pack_ids(ids: Iterable[int]) -> bytes:
    """Pack token ids (each 0 <= id < 2**32) as little-endian u32; OverflowError outside."""
    return _to_little_endian(ids if isinstance(ids, array) else array(_UINT32, ids))


def unpack_ids(packed: bytes) -> array[int]:
    """Return the ids of `pack_ids` as an array('I'); ValueError if cut inside an id."""
    return _from_little_endian(_UINT32, packed)


def count_ids(packed: bytes) -> int:
    """Return how many ids `pack_ids` packed."""
    return len(packed) // _ID_BYTES


def pack_floats(values: Iterable[float]) -> bytes:
    """Pack numbers as little-endian f32."""
    return _to_little_endian(array(_FLOAT32, values))


def unpack_floats(packed: bytes) -> array[float]:
    """Return the numbers of `pack_floats` as an array('f')."""
    return _from_little_endian(_FLOAT32, packed)


def pack_generations(numbers: Iterable[int]) -> bytes:
    """Pack block generations as little-endian i64."""
    return _to_little_endian(array(_INT64, numbers))


def unpack_generations(packed: bytes) -> array[int]:
    """Return the numbers of `pack_generations` as an array('q')."""
    return _from_little_endian(_INT64, packed)


def _to_little_endian(values: array) -> bytes:  # type: ignore[type-arg]
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values.tobytes()


def _from_little_endian(typecode: str, packed: bytes) -> array:  # type: ignore[type-arg]
    values = array(typecode)
    values.frombytes(packed)
    if sys.byteorder == "big":
        values.byteswap()
    return values
