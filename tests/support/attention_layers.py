"""One attention layer fed step by step, natively and on torch, over the same blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from twinfire.artifacts.tensors import MappedTensor
from twinfire.cache.kv_group import BLOCK_SIZE, KvGroup
from twinfire.kernels.cpu import _native
from twinfire.kernels.ops import HeadLayout, RopeTable
from twinfire.kernels.step_batch import StepBatch
from twinfire.kernels.torch.exact import ExactNumerics
from twinfire.kernels.torch.kv_memory import KvMemory
from twinfire.kernels.torch.step import TorchStep
from twinfire.kernels.torch.weights import TorchWeights

NUM_LAYERS = 2
LAYER = 1
Rows = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Turn:
    """What is done to heads before they meet."""

    query_norm: Rows | None = None
    key_norm: Rows | None = None
    norm_eps: float = 1e-6
    rope: RopeTable | None = None


@dataclass
class FedSequence:
    """Fused rows of a whole sequence, where its blocks lie, and how much has been computed."""

    rows: Rows
    block_ids: npt.NDArray[np.int32]
    num_computed: int = 0
    outputs: list[Rows] = field(default_factory=list)


def make_sequences(
    rng: np.random.Generator, heads: HeadLayout, lengths: list[int], spare_blocks: int = 2
) -> tuple[list[FedSequence], int]:
    """Return sequences in scattered blocks, and how many blocks there must be."""
    counts = [-(-length // BLOCK_SIZE) for length in lengths]
    num_blocks = sum(counts) + spare_blocks
    ids = rng.permutation(num_blocks).astype(np.int32)
    sequences = []
    for length, count in zip(lengths, counts, strict=True):
        rows = rng.standard_normal((length, heads.fused_width)).astype(np.float32)
        sequences.append(FedSequence(rows, ids[:count]))
        ids = ids[count:]
    return sequences, num_blocks


def batch_of(pieces: list[tuple[FedSequence, int]]) -> tuple[StepBatch, Rows]:
    """Pack the next `count` rows of each sequence."""
    positions = [
        np.arange(sequence.num_computed, sequence.num_computed + count)
        for sequence, count in pieces
    ]
    slots = [
        sequence.block_ids[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
        for (sequence, _), at in zip(pieces, positions, strict=True)
    ]
    width = max(len(sequence.block_ids) for sequence, _ in pieces)
    tables = [
        np.pad(sequence.block_ids, (0, width - len(sequence.block_ids))) for sequence, _ in pieces
    ]
    counts = [count for _, count in pieces]
    rows = [sequence.rows[at] for (sequence, _), at in zip(pieces, positions, strict=True)]
    batch = StepBatch(
        token_ids=np.zeros(sum(counts), np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        slots=np.concatenate(slots).astype(np.int32),
        query_starts=np.cumsum([0, *counts]).astype(np.int32),
        context_lens=np.array([at[-1] + 1 for at in positions], np.int32),
        block_tables=np.stack(tables).astype(np.int32),
        logit_rows=np.zeros(0, np.int32),
        block_copies=np.zeros((0, 2), np.int32),
    )
    return batch, np.concatenate(rows)


class NativeLayer:
    def __init__(
        self,
        heads: HeadLayout,
        num_blocks: int,
        *,
        isa: str,
        kv_format: str = "bf16",
        num_threads: int = 1,
        turn: Turn | None = None,
        window: int | None = None,
    ) -> None:
        self.cache = _native.KvCache(
            NUM_LAYERS, heads.num_kv_heads, heads.head_dim, kv_format, num_blocks
        )
        team = _native.ThreadTeam(num_threads)
        self._attention = _native.Attention(team, isa, self.cache, heads.num_heads)
        self._scale = heads.head_dim**-0.5
        self._turn = turn or Turn()
        self._window = window or 0

    def step(
        self,
        batch: StepBatch,
        rows: Rows,
        *,
        as_bf16: bool = False,
        layers: Sequence[int] = (LAYER,),
    ) -> Rows:
        turn = self._turn
        factors = None
        if turn.rope is not None:
            factors = _native.rope_factors(
                batch.positions, turn.rope.inv_freq, turn.rope.attention_factor
            )
        out = self._attention(
            layers,
            np.ascontiguousarray(rows),
            batch.slots,
            batch.query_starts,
            batch.context_lens,
            batch.block_tables,
            scale=self._scale,
            window=self._window,
            query_norm=turn.query_norm,
            key_norm=turn.key_norm,
            norm_eps=turn.norm_eps,
            rope_factors=factors,
            as_bf16=as_bf16,
        )
        return out.view(np.uint16 if as_bf16 else np.float32)


class TorchLayer:
    def __init__(
        self,
        heads: HeadLayout,
        num_blocks: int,
        *,
        dtype: str = "f32",
        turn: Turn | None = None,
        window: int | None = None,
    ) -> None:
        device = torch.device("cpu")
        group = KvGroup("target", NUM_LAYERS, heads.num_kv_heads, heads.head_dim, dtype)
        self.kv = KvMemory(group, num_blocks, BLOCK_SIZE, device)
        self._heads = heads
        self._window = window
        self._turn = turn or Turn()
        self._numerics = ExactNumerics()
        self._weights = TorchWeights(
            self._numerics.pack, torch.float32, device, lambda num_bytes: None
        )
        self._norms = [
            self._weights.vector(MappedTensor("norm", norm.shape, "f32", norm))
            for norm in (self._turn.query_norm, self._turn.key_norm)
            if norm is not None
        ]
        self._rope = self._weights.rope(self._turn.rope) if self._turn.rope is not None else None

    def step(self, batch: StepBatch, rows: Rows) -> Rows:
        ops = TorchStep(self._weights, self._numerics, self.kv, batch)
        fused = torch.from_numpy(rows.copy())
        if self._norms:
            fused = ops.head_norm(fused, self._heads, *self._norms, self._turn.norm_eps)
        if self._rope is not None:
            fused = ops.rope(fused, self._heads, self._rope)
        ops.write_kv(fused.to(self.kv.dtype), self._heads, LAYER)
        if self.kv.dtype != torch.float32:
            return rows
        scale = self._heads.head_dim**-0.5
        return ops.attention(fused, self._heads, LAYER, self._window, scale).numpy()


def feed(
    layer: NativeLayer | TorchLayer, steps: list[list[tuple[FedSequence, int]]]
) -> list[list[Rows]]:
    """Run steps of (sequence, rows); returns each step's outputs by piece."""
    outputs = []
    for pieces in steps:
        batch, rows = batch_of(pieces)
        attended = layer.step(batch, rows)
        parts = np.split(attended, batch.query_starts[1:-1])
        for (sequence, count), part in zip(pieces, parts, strict=True):
            sequence.num_computed += count
            sequence.outputs.append(part)
        outputs.append(parts)
    return outputs


def whole_output(sequence: FedSequence) -> Rows:
    """Return what all steps so far gave a sequence's rows."""
    return np.concatenate(sequence.outputs)


def again(sequences: list[FedSequence]) -> list[FedSequence]:
    """Return the same sequences with nothing computed."""
    return [FedSequence(sequence.rows, sequence.block_ids) for sequence in sequences]
