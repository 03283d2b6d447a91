"""Blocks between workers of which one has a draft head, or another one than the other."""

from __future__ import annotations

import numpy as np
import pytest

from support.array_memory import LARGE, SMALL, ArrayMemory
from support.connector_ends import MakeEnd, blocks_of
from twinfire.cache.kv_group import KvGroup, KvLayout
from twinfire.protocol.addresses import Address
from twinfire.transfer.shared_blocks import target_part


def with_head(layout: KvLayout, num_layers: int = 1) -> KvLayout:
    groups = (KvGroup("draft", num_layers, 2, 16, "int8"), KvGroup("draft_scales", 1, 2, 1, "f32"))
    return KvLayout((*layout.groups, *groups), layout.block_size)


@pytest.mark.parametrize("target", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("heads", ["ours", "theirs", "two", "same"])
def test_what_both_have_arrives_and_nothing_else(
    make_end: MakeEnd, listen: Address, target: KvLayout, heads: str
) -> None:
    there_layout, there_draft = (target, "") if heads == "ours" else (with_head(target), "a")
    here_layout, here_draft = {
        "ours": (with_head(target), "a"),
        "theirs": (target, ""),
        "two": (with_head(target, num_layers=3), "b"),
        "same": (with_head(target), "a"),
    }[heads]
    there = make_end(ArrayMemory(40, there_layout, draft=there_draft).fill(), listen, name="there")
    here = make_end(ArrayMemory(40, here_layout, draft=here_draft))
    remote_ids, local_ids = list(range(40)), list(reversed(range(40)))
    assert here.read(there.peer, blocks_of(there.memory, remote_ids), local_ids).wait() is None
    shared = there_layout if heads == "same" else target_part(target)
    num_words = shared.bytes_per_block // 4
    for remote_id, local_id in zip(remote_ids, local_ids, strict=True):
        words = here.memory.words[local_id]
        assert np.array_equal(words[:num_words], there.memory.expected(remote_id)[:num_words])
        assert not words[num_words:].any()
