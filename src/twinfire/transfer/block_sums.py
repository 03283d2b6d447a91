"""Checksums of blocks, against content that changed on its way."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from twinfire.protocol.tokens import pack_ids
from twinfire.transfer.ports import BlockBytes


def block_sums(content: BlockBytes, block_ids: Sequence[int]) -> bytes:
    """Return the crc32 of each block's wire form, as u32."""
    return pack_ids([zlib.crc32(content.export_blocks((block_id,))) for block_id in block_ids])
