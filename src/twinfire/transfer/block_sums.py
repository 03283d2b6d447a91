"""Checksums of blocks, against content that changed on its way."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from twinfire.protocol.tokens import pack_ids, unpack_ids
from twinfire.transfer.ports import BlockBytes


def block_sums(content: BlockBytes, block_ids: Sequence[int]) -> bytes:
    """Return the crc32 of what `content` gives of each block, as u32."""
    wire = bytearray(content.bytes_per_block)
    sums: list[int] = []
    for block_id in block_ids:
        content.export_blocks((block_id,), wire)
        sums.append(zlib.crc32(wire))
    return pack_ids(sums)


def sums_agree(
    content: BlockBytes, expected: bytes, block_ids: Sequence[int], indices: Sequence[int]
) -> bool:
    """Return whether the blocks at `indices` of a prompt hold what `expected`, of all, says."""
    if len(expected) != len(pack_ids(block_ids)):
        return False
    sums = unpack_ids(expected)
    found = unpack_ids(block_sums(content, [block_ids[index] for index in indices]))
    return [sums[index] for index in indices] == list(found)
