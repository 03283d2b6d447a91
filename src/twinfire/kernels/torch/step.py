"""One step's ops on torch, each run at once.

Implements `StepOps` and `LatentStepOps`. Lives for one step: holds its inputs on the device and
what the layers share (rotary factors, planned attention, where KV goes), and owns no memory that
outlives it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from twinfire.kernels.latent_ops import PerHeadRef
from twinfire.kernels.ops import EmbeddingRef, HeadLayout, LinearRef, RopeRef, VectorRef
from twinfire.kernels.step_batch import Int32Array, StepBatch
from twinfire.kernels.torch.kv_memory import KvMemory
from twinfire.kernels.torch.numerics import Attention, Numerics
from twinfire.kernels.torch.weights import TorchWeights


@dataclass(frozen=True, slots=True)
class KeptFeatures:
    """Features of an earlier step, and which of their rows each token of this one reads."""

    features: Sequence[Tensor]
    """Each [rows, width]."""
    rows: Int32Array
    """[T]"""


class TorchStep:
    """Ops of the step that computes `batch`."""

    def __init__(
        self,
        weights: TorchWeights,
        numerics: Numerics,
        kv: KvMemory,
        batch: StepBatch,
        kept: KeptFeatures | None = None,
    ) -> None:
        self._weights = weights
        self._numerics = numerics
        self._kv = kv
        self._batch = batch
        self._kept = kept
        self._attention: dict[tuple[HeadLayout, int | None], Attention] = {}
        self._turns: dict[RopeRef, tuple[Tensor, Tensor]] = {}
        self._token_rows = kv.token_rows(batch.slots)
        self._unfinished_blocks = self._blocks_left_unfinished()
        self._features: dict[int, Tensor] = {}

    @property
    def features(self) -> list[Tensor]:
        """What `keep_feature` kept, each [T, width], in order."""
        return [self._features[index] for index in sorted(self._features)]

    def embed(self, table: EmbeddingRef) -> Tensor:
        """Return the rows of the step's tokens."""
        return self._weights.embedding_at(table)(self._batch.token_ids).to(self._kv.device)

    def rms_norm(self, x: Tensor, weight: VectorRef, eps: float) -> Tensor:
        """Norm each row."""
        return self._numerics.rms_norm(x, self._weights.vector_at(weight), eps)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: VectorRef, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Add, then norm each row."""
        total = residual.add_(x)
        return self.rms_norm(total, weight, eps), total

    def linear(self, x: Tensor, weight: LinearRef) -> Tensor:
        """Multiply."""
        return self._weights.linear_at(weight)(x)

    def head_norm(
        self, qkv: Tensor, heads: HeadLayout, query: VectorRef, key: VectorRef, eps: float
    ) -> Tensor:
        """Norm each query head and each key head."""
        by_head = _by_head(qkv, heads)
        for part, weight in (
            (by_head[:, : heads.num_heads], query),
            (by_head[:, heads.num_heads :], key),
        ):
            normed = self._numerics.rms_norm(
                part.contiguous(), self._weights.vector_at(weight), eps
            )
            part.copy_(normed)
        return qkv

    def rope(self, qkv: Tensor, heads: HeadLayout, table: RopeRef) -> Tensor:
        """Turn queries and keys."""
        cos, sin = self._turn(table)
        by_head = _by_head(qkv, heads)
        halves = by_head.view(*by_head.shape[:2], 2, -1).to(torch.float32)
        # Two roundings and never a fused multiply-add, which only some vector widths would use.
        turned = halves * cos + halves.flip(-2) * sin
        by_head.copy_(turned.flatten(-2))
        return qkv

    def write_kv(self, qkv: Tensor, heads: HeadLayout, layer: int) -> None:
        """Store keys and values."""
        if self._unfinished_blocks is not None:
            self._kv.zero_rows(layer, self._unfinished_blocks)
        self._kv.write(layer, self._token_rows, qkv[:, heads.query_width :])

    def attention(
        self, qkv: Tensor, heads: HeadLayout, layer: int, window: int | None, scale: float
    ) -> Tensor:
        """Attend."""
        key = (heads, window)
        if key not in self._attention:
            self._attention[key] = self._numerics.plan_attention(
                self._batch, heads, window, self._kv
            )
        return self._attention[key](qkv[:, : heads.query_width], layer, scale)

    def per_head(self, x: Tensor, weight: PerHeadRef) -> Tensor:
        """Multiply head by head."""
        return self._weights.linear_at(weight)(x)

    def join_heads(self, parts: Sequence[Tensor], num_heads: int) -> Tensor:
        """Put the parts of each head together."""
        return torch.cat([part.view(len(part), num_heads, -1) for part in parts], -1).flatten(1)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Gate."""
        return self._numerics.silu_mul(gate_up)

    def keep_feature(self, x: Tensor, index: int) -> None:
        """Keep a copy."""
        self._features[index] = x.clone()

    def kept_feature(self, index: int, width: int) -> Tensor:
        """Return the rows that this step's tokens read."""
        assert self._kept is not None, "the step was given no kept features"
        return _rows_at(self._kept.features[index], self._kept.rows)

    def concat(self, parts: Sequence[Tensor]) -> Tensor:
        """Join."""
        return torch.cat(list(parts), dim=-1)

    def take_logit_rows(self, x: Tensor) -> Tensor:
        """Return the rows that need logits."""
        return _rows_at(x, self._batch.logit_rows)

    def _turn(self, ref: RopeRef) -> tuple[Tensor, Tensor]:
        """Return cos and signed sin, both float32 [T, 1, 2, head_dim / 2]."""
        if ref not in self._turns:
            table = self._weights.rope_at(ref)
            # Angles are rounded to float32, as they were when models were trained.
            angles = self._batch.positions.astype(np.float32)[:, None] * table.inv_freq[None, :]
            cos = np.cos(angles.astype(np.float64)) * table.attention_factor
            sin = np.sin(angles.astype(np.float64)) * table.attention_factor
            pair = (np.stack([cos, cos], axis=1), np.stack([-sin, sin], axis=1))
            first, second = (
                torch.from_numpy(part.astype(np.float32)[:, None]).to(self._kv.device)
                for part in pair
            )
            self._turns[ref] = (first, second)
        return self._turns[ref]

    def _blocks_left_unfinished(self) -> Tensor | None:
        size = self._kv.block_size
        begun = self._batch.slots[self._batch.slots % size == 0] // size
        ended = self._batch.slots[self._batch.slots % size == size - 1] // size
        unfinished = np.setdiff1d(begun, ended)
        return self._kv.block_rows(unfinished) if len(unfinished) else None


def _rows_at(x: Tensor, indices: Int32Array) -> Tensor:
    return x.index_select(0, torch.from_numpy(indices.astype(np.int64)).to(x.device))


def _by_head(qkv: Tensor, heads: HeadLayout) -> Tensor:
    """Return a view [T, query and key heads, head_dim]."""
    turned = heads.query_width + heads.kv_width
    return qkv[:, :turned].view(len(qkv), -1, heads.head_dim)
