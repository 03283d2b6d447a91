"""Content hashes of full KV blocks, chained so that one hash names a whole prefix.

`h_i = sha256(h_{i-1}, tokens of block i as little-endian u32, extra)`, where `h_{-1}` comes of the
block size and a seed, so that hashes of two deployments never meet. A sequence's hashes are
extended, never recomputed. Partly filled blocks have no hash.
"""

from __future__ import annotations

import secrets
import struct
from array import array
from hashlib import sha256

from twinfire.protocol.tokens import pack_ids

_DOMAIN = b"twinfire kv block chain 1"
_TAG = struct.Struct("<BI")
_TOKEN_BYTES = 4
_RANDOM_SEED_BYTES = 32


class HashChain:
    """Hashes blocks of `block_size` tokens.

    Processes that exchange hashes are given the same `seed`; without one it is drawn at random, so
    that nobody outside can compute a hash.
    """

    def __init__(self, block_size: int, seed: bytes = b"") -> None:
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; it must be at least 1")
        self.block_size = block_size
        root = sha256(_DOMAIN + block_size.to_bytes(4, "little"))
        root.update(seed or secrets.token_bytes(_RANDOM_SEED_BYTES))
        self._root = root.digest()

    def extend(self, hashes: list[bytes], tokens: array[int], extra: bytes = b"") -> None:
        """Append to `hashes` those of the full blocks of `tokens` (array('I')) that it lacks.

        `extra` (see `cache_extra_key`) must be the same in every call for one sequence.
        """
        assert tokens.typecode == "I", "token ids are hashed as u32"
        first, stop = len(hashes), len(tokens) // self.block_size
        packed = pack_ids(tokens[first * self.block_size : stop * self.block_size])
        parent = hashes[-1] if hashes else self._root
        width = self.block_size * _TOKEN_BYTES
        for start in range(0, len(packed), width):
            parent = sha256(parent + packed[start : start + width] + extra).digest()
            hashes.append(parent)


def cache_extra_key(*, salt: str = "", adapter: str = "", draft_head: str = "") -> bytes:
    """Return what must be equal, beside the tokens, for two sequences to share blocks.

    Each part that is present is tagged by its kind and its length, so that an adapter's name never
    equals another tenant's salt and no two lists of parts join to the same bytes. Empty parts are
    absent; with none the key is empty.
    """
    key = b""
    for kind, value in enumerate((salt, adapter, draft_head)):
        if value:
            # Clients may send lone surrogates in JSON; they are as good a salt as any.
            encoded = value.encode("utf-8", "surrogatepass")
            key += _TAG.pack(kind, len(encoded)) + encoded
    return key
