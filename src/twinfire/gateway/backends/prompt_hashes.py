"""Block hashes of prompts, without holding up the event loop for long ones."""

from __future__ import annotations

import asyncio
from array import array

from twinfire.cache.block_hash import HashChain

_SLICE_BLOCKS = 256
"""About 0.25 ms. The hashes of small blocks hold the interpreter's lock: on a thread they would
hold the loop up for longer than these slices do."""


async def hash_blocks(
    chain: HashChain, hashes: list[bytes], tokens: array[int], extra: bytes
) -> None:
    """Append to `hashes` those of the full blocks of `tokens` that it lacks."""
    num_blocks = len(tokens) // chain.block_size
    while num_blocks - len(hashes) > _SLICE_BLOCKS:
        chain.extend(hashes, tokens[: (len(hashes) + _SLICE_BLOCKS) * chain.block_size], extra)
        await asyncio.sleep(0)
    chain.extend(hashes, tokens, extra)
