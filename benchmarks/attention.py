"""Attention of the native backend beside the torch reference and a sweep over as many bytes.

All take turns in one process; a cell is the median of its turns. Blocks are scattered and several
layers are attended in turn, so that their KV does not fit in the last cache. With one thread the
clock is the thread's own CPU time, which others on the machine do not lengthen.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from gemm import medians, sweep
from twinfire.cache.kv_group import BLOCK_SIZE, KvGroup
from twinfire.kernels.cpu import _native
from twinfire.kernels.ops import HeadLayout
from twinfire.kernels.step_batch import StepBatch
from twinfire.kernels.torch.fast import FastNumerics
from twinfire.kernels.torch.kv_memory import KvMemory

KV_FORMATS = ("bf16", "int8")


@dataclass(frozen=True)
class Case:
    """Sequences of one length, each with its last `num_queries` tokens in the step."""

    name: str
    heads: HeadLayout
    num_sequences: int
    context: int
    num_queries: int
    num_layers: int

    @property
    def num_blocks(self) -> int:
        return self.num_sequences * -(-self.context // BLOCK_SIZE)

    @property
    def pairs(self) -> int:
        """Query and key tokens that see each other, of one layer."""
        hidden = self.num_queries * (self.num_queries - 1) // 2
        return self.num_sequences * (self.num_queries * self.context - hidden)

    @property
    def flops(self) -> int:
        return 4 * self.pairs * self.heads.query_width * self.num_layers

    def kv_bytes(self, kv_format: str) -> int:
        elements = self.num_sequences * self.context * 2 * self.heads.kv_width * self.num_layers
        return elements * (2 if kv_format == "bf16" else 1)

    def step(self) -> StepBatch:
        """Return the step, its blocks in random order."""
        order = np.random.default_rng(0).permutation(self.num_blocks).astype(np.int32)
        tables = order.reshape(self.num_sequences, -1)
        at = np.arange(self.context - self.num_queries, self.context)
        slots = tables[:, at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
        num_tokens = slots.size
        return StepBatch(
            token_ids=np.zeros(num_tokens, np.int32),
            positions=np.tile(at, self.num_sequences).astype(np.int32),
            slots=slots.reshape(-1).astype(np.int32),
            query_starts=np.arange(0, num_tokens + 1, self.num_queries, dtype=np.int32),
            context_lens=np.full(self.num_sequences, self.context, np.int32),
            block_tables=tables,
            logit_rows=np.zeros(0, np.int32),
            block_copies=np.zeros((0, 2), np.int32),
        )

    def rows(self) -> np.ndarray:
        shape = (self.num_sequences * self.num_queries, self.heads.fused_width)
        return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


SMOLLM2 = HeadLayout(9, 3, 64)
CASES = (
    Case("16 x 1024, 9/3 heads of 64", SMOLLM2, 16, 1024, 1, 8),
    Case("16 x 1024, 16/8 heads of 128", HeadLayout(16, 8, 128), 16, 1024, 1, 2),
    Case("1 x 4000, 9/3 heads of 64", SMOLLM2, 1, 4000, 1, 30),
    Case("prompt of 4000, 9/3 heads of 64", SMOLLM2, 1, 4000, 4000, 1),
)


def native(case: Case, kv_format: str, team: _native.ThreadTeam) -> Callable[[], None]:
    """Return a call that attends every layer once, over keys and values that are random."""
    heads, step, rows = case.heads, case.step(), case.rows()
    cache = _native.KvCache(
        case.num_layers, heads.num_kv_heads, heads.head_dim, kv_format, case.num_blocks
    )
    content = np.random.default_rng(2).integers(
        0, 0x3F80 if kv_format == "bf16" else 127, cache.bytes_per_block // 2, np.uint16
    )
    for block in range(case.num_blocks):
        cache.import_blocks([block], content.tobytes())
    attention = _native.Attention(team, _native.isa(), cache, heads.num_heads)

    def run() -> None:
        attention(
            range(case.num_layers),
            rows,
            step.slots,
            step.query_starts,
            step.context_lens,
            step.block_tables,
            scale=heads.head_dim**-0.5,
        )

    return run


def reference(case: Case) -> Callable[[], None]:
    """Return a call that attends every layer once on torch, in bf16."""
    heads, step = case.heads, case.step()
    device = torch.device("cpu")
    group = KvGroup("target", case.num_layers, heads.num_kv_heads, heads.head_dim, "bf16")
    kv = KvMemory(group, case.num_blocks, BLOCK_SIZE, device)
    content = bytes(case.num_blocks * group.bytes_per_block())
    kv.import_blocks(range(case.num_blocks), content)
    attend = FastNumerics(device, torch.bfloat16).plan_attention(step, heads, None, kv)
    queries = torch.from_numpy(case.rows())[:, : heads.query_width].bfloat16()

    def run() -> None:
        for layer in range(case.num_layers):
            attend(queries, layer, heads.head_dim**-0.5)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    team = _native.ThreadTeam(args.threads)
    table = Table(title=f"threads: {args.threads}, {_native.isa()}")
    for heading in ("step", "KV", "ms a layer", "GFLOP/s", "GB/s", "x torch", "x sweep of KV"):
        table.add_column(heading, justify="right")
    for case in CASES:
        calls = {"torch": reference(case)}
        for kv_format in KV_FORMATS:
            calls[kv_format] = native(case, kv_format, team)
            calls[f"sweep {kv_format}"] = sweep(case.kv_bytes(kv_format))
        seconds = medians(calls, args.turns, clock)
        for name in ("torch", *KV_FORMATS):
            own, num_bytes = seconds[name], case.kv_bytes("int8" if name == "int8" else "bf16")
            table.add_row(
                case.name,
                name,
                f"{own / case.num_layers * 1e3:.2f}",
                f"{case.flops / own / 1e9:.0f}",
                f"{num_bytes / own / 1e9:.1f}",
                f"{seconds['torch'] / own:.2f}",
                f"{seconds[f'sweep {name}'] / own:.2f}" if name != "torch" else "",
            )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
