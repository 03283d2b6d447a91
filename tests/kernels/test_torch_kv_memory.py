"""Blocks in memory and on the wire."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.wire_blocks import exported
from twinfire.cache.kv_group import KvGroup
from twinfire.kernels.torch.kv_memory import KvMemory

CPU = torch.device("cpu")
GROUP = KvGroup("target", num_layers=2, num_kv_heads=3, head_dim=8, dtype="f32")


def filled_memory(num_blocks: int, seed: int) -> tuple[KvMemory, np.ndarray]:
    """Return memory and what was written to it, [layer, token, plane * head_dim]."""
    memory = KvMemory(GROUP, num_blocks, 32, CPU)
    tokens = np.random.default_rng(seed).normal(size=(2, num_blocks * 32, 6 * 8)).astype(np.float32)
    rows = memory.token_rows(np.arange(num_blocks * 32))
    for layer in range(2):
        memory.write(layer, rows, torch.from_numpy(tokens[layer]))
    return memory, tokens


def test_wire_layout_is_the_canonical_one() -> None:
    memory, tokens = filled_memory(5, seed=0)
    wire = np.frombuffer(exported(memory, [4, 1]), np.float32)
    # [block][layer][k, v][kv_head][token][head_dim]
    shaped = wire.reshape(2, 2, 2, 3, 32, 8)
    for index, block in enumerate((4, 1)):
        written = tokens[:, block * 32 : block * 32 + 32].reshape(2, 32, 2, 3, 8)
        np.testing.assert_array_equal(shaped[index], written.transpose(0, 2, 3, 1, 4))


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_blocks_survive_the_wire(dtype: str) -> None:
    group = KvGroup("target", 2, 3, 8, dtype)
    source, target = KvMemory(group, 4, 32, CPU), KvMemory(group, 6, 32, CPU)
    rows = source.token_rows(np.arange(4 * 32))
    for layer in range(2):
        source.write(layer, rows, torch.randn(4 * 32, 48).to(source.dtype))
    content = exported(source, [3, 0])
    assert len(content) == 2 * group.bytes_per_block()
    target.import_blocks([5, 2], content)
    assert exported(target, [5, 2]) == content
    assert exported(target, []) == b""
    target.import_blocks([], b"")


def test_wrong_sizes_and_ids_are_refused() -> None:
    memory = KvMemory(GROUP, 4, 32, CPU)
    with pytest.raises(ValueError, match="they take"):
        memory.import_blocks([0], b"\0" * (GROUP.bytes_per_block() - 1))
    for block_id in (-1, 4):
        with pytest.raises(ValueError, match=r"\[0, 4\)"):
            exported(memory, [block_id])


def test_copies_read_before_they_write() -> None:
    memory, _ = filled_memory(4, seed=1)
    before = [exported(memory, [block]) for block in range(4)]
    memory.copy_blocks(np.array([[0, 3], [3, 1]], np.int32))
    assert exported(memory, [0]) == before[0]
    assert exported(memory, [3]) == before[0]
    assert exported(memory, [1]) == before[3]


def test_padding_block_is_zero_whatever_is_written() -> None:
    memory, _ = filled_memory(3, seed=2)
    rows = memory.block_rows(np.array([memory.padding_block]))
    assert not memory.gather(0, rows).any()
