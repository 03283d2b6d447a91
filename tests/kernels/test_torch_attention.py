"""Paged attention of both strategies against float64, with garbage in every unread place."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from twinfire.cache.kv_group import BLOCK_SIZE, KvGroup
from twinfire.kernels.ops import HeadLayout
from twinfire.kernels.step_batch import StepBatch
from twinfire.kernels.torch.exact import ExactNumerics
from twinfire.kernels.torch.fast import FastNumerics
from twinfire.kernels.torch.kv_memory import KvMemory
from twinfire.kernels.torch.numerics import Numerics

CPU = torch.device("cpu")
NUM_BLOCKS = 80
HEADS = [
    HeadLayout(4, 4, 8),
    HeadLayout(9, 3, 16),
    HeadLayout(5, 1, 10),
    HeadLayout(7, 7, 64),
    HeadLayout(6, 1, 24, value_dim=16),
    HeadLayout(8, 2, 12, value_dim=12),
]


@dataclass
class Case:
    """KV of random sequences, written block by block, and the queries that attend to it."""

    heads: HeadLayout
    kv: KvMemory
    batch: StepBatch
    queries: Tensor
    keys: list[Tensor]
    values: list[Tensor]


def make_case(heads: HeadLayout, lens: list[tuple[int, int]], dtype: str = "f32") -> Case:
    """Build sequences of (queries, context) tokens."""
    generator = torch.Generator().manual_seed(len(lens) * 1000 + lens[0][1])
    in_keys = heads.value_dim is not None
    group = KvGroup("target", 1, heads.num_kv_heads, heads.head_dim, dtype, in_keys)
    kv = KvMemory(group, NUM_BLOCKS, 32, CPU)
    stored_width = heads.fused_width - heads.query_width
    for block in range(NUM_BLOCKS):
        kv.zero_block(block)
    free = np.random.default_rng(0).permutation(NUM_BLOCKS)
    tables, positions, keys, values, used = [], [], [], [], 0
    for num_queries, context in lens:
        count = -(-context // BLOCK_SIZE)
        table = free[used : used + count]
        used += count
        tables.append(table)
        positions.append(np.arange(context - num_queries, context))
        both = torch.randn(context, stored_width, generator=generator).to(kv.dtype)
        tokens = np.arange(context)
        slots = table[tokens // BLOCK_SIZE] * BLOCK_SIZE + tokens % BLOCK_SIZE
        kv.write(0, kv.token_rows(slots), both)
        shape = (context, heads.num_kv_heads, heads.head_dim)
        keys.append(both[:, : heads.kv_width].reshape(shape))
        values.append(both[:, -heads.kv_width :].reshape(shape)[..., : heads.value_dim])
    # What no table names may hold anything at all.
    poison = torch.full((BLOCK_SIZE, stored_width), float("nan"), dtype=kv.dtype)
    for block in free[used:]:
        kv.write(0, kv.token_rows(block * BLOCK_SIZE + np.arange(BLOCK_SIZE)), poison)
    width = max(len(table) for table in tables)
    batch = StepBatch(
        token_ids=np.zeros(sum(n for n, _ in lens), np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        slots=np.zeros(0, np.int32),
        query_starts=np.cumsum([0] + [n for n, _ in lens]).astype(np.int32),
        context_lens=np.array([context for _, context in lens], np.int32),
        block_tables=np.stack(
            [np.pad(table, (0, width - len(table)), constant_values=free[-1]) for table in tables]
        ).astype(np.int32),
        logit_rows=np.zeros(0, np.int32),
        block_copies=np.zeros((0, 2), np.int32),
    )
    queries = torch.randn(batch.num_tokens, heads.query_width, generator=generator).to(kv.dtype)
    return Case(heads, kv, batch, queries, keys, values)


def expected(case: Case, window: int | None, scale: float) -> Tensor:
    """Attend in float64, sequence by sequence."""
    heads, rows = case.heads, []
    for s, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        part = slice(case.batch.query_starts[s], case.batch.query_starts[s + 1])
        queries = case.queries[part].double().view(-1, heads.num_heads, heads.head_dim)
        keys, values = (
            t.double().repeat_interleave(heads.queries_per_kv_head, 1) for t in (keys, values)
        )
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
        query_at = torch.from_numpy(case.batch.positions[part].astype(np.int64))[:, None]
        key_at = torch.arange(len(keys))[None, :]
        hidden = key_at > query_at
        if window is not None:
            hidden |= key_at <= query_at - window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        rows.append(torch.einsum("hqk,khd->qhd", weights, values).reshape(-1, heads.attended_width))
    return torch.cat(rows)


def attend(numerics: Numerics, case: Case, window: int | None, scale: float) -> Tensor:
    return numerics.plan_attention(case.batch, case.heads, window, case.kv)(case.queries, 0, scale)


MIXES = {
    "decode": [(1, 1), (1, 32), (1, 33), (1, 300), (1, 257)],
    "whole": [(1, 1), (40, 40), (129, 129)],
    "chunk": [(17, 300), (150, 410)],
    "mixed": [(1, 500), (30, 30), (1, 5), (70, 333), (2, 64)],
}


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("window", [None, 1, 24, 256, 300])
def test_against_float64(heads: HeadLayout, mix: str, window: int | None) -> None:
    scale = heads.head_dim**-0.5
    case = make_case(heads, MIXES[mix])
    for numerics in (ExactNumerics(), FastNumerics(CPU, torch.float32)):
        attended = attend(numerics, case, window, scale)
        torch.testing.assert_close(
            attended.double(), expected(case, window, scale), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("window", [None, 24])
def test_bf16_is_close(mix: str, window: int | None) -> None:
    case = make_case(HEADS[1], MIXES[mix], "bf16")
    attended = attend(FastNumerics(CPU, torch.bfloat16), case, window, 0.25)
    torch.testing.assert_close(
        attended.double(), expected(case, window, 0.25), rtol=5e-2, atol=3e-2
    )


@pytest.mark.parametrize("window", [None, 200])
def test_exact_rows_do_not_depend_on_their_company(window: int | None) -> None:
    case = make_case(HEADS[1], MIXES["mixed"])
    together = attend(ExactNumerics(), case, window, 0.25)
    batch = case.batch
    for s in range(batch.num_sequences):
        for row in range(batch.query_starts[s], batch.query_starts[s + 1], 7):
            alone = StepBatch(
                token_ids=batch.token_ids[row : row + 1],
                positions=batch.positions[row : row + 1],
                slots=batch.slots,
                query_starts=np.array([0, 1], np.int32),
                context_lens=batch.positions[row : row + 1] + 1,
                block_tables=batch.block_tables[s : s + 1],
                logit_rows=batch.logit_rows,
                block_copies=batch.block_copies,
            )
            one = Case(case.heads, case.kv, alone, case.queries[row : row + 1], [], [])
            assert torch.equal(attend(ExactNumerics(), one, window, 0.25)[0], together[row])
