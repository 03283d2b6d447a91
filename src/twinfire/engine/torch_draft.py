"""An EAGLE-3 head on the torch op set, beside the target whose features it reads.

Implements `DraftRunner`; the reference for the native one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twinfire.artifacts.draft_head import DraftHead
from twinfire.cache.kv_group import KvGroup
from twinfire.engine.draft_runner import (
    DRAFT_GROUP,
    DraftedTokens,
    Float32Array,
    check_fused,
)
from twinfire.engine.spans import pack_rows
from twinfire.engine.torch_kv import TorchKv
from twinfire.kernels.ops import StepOps
from twinfire.kernels.step_batch import Int32Array, StepBatch
from twinfire.kernels.torch.numerics import Numerics
from twinfire.kernels.torch.step import KeptFeatures, TorchStep
from twinfire.kernels.torch.weights import TorchWeights
from twinfire.models.eagle3_head import Eagle3Head

KV_INDEX = 1
"""Which memory of `TorchKv` is the head's."""


class TorchDraftRunner:
    """A head whose runner sets `target_features` with every step."""

    def __init__(
        self,
        body: Eagle3Head,
        draft_ids: npt.NDArray[np.int64] | None,
        weights: TorchWeights,
        numerics: Numerics,
        kv: TorchKv,
    ) -> None:
        self.target_features: Sequence[Tensor] = ()
        """What the target's last step kept, each [rows, width]."""
        self._body = body
        self._draft_ids = draft_ids
        self._weights = weights
        self._numerics = numerics
        self._kv = kv
        self._own_rows: Sequence[Tensor] = ()

    @property
    def weight_bytes(self) -> int:
        """Memory of the head's packed weights, without the target's embedding."""
        return self._weights.num_bytes

    @property
    def fused_width(self) -> int:
        """Elements of a row of `fused_rows`."""
        return self._body.width

    def first(self, batch: StepBatch, feature_rows: Int32Array) -> DraftedTokens:
        """Draft from the target's rows `feature_rows`; ValueError on a row that is none."""
        return self._run(self._body.first, self.target_features, batch, feature_rows)

    def further(self, batch: StepBatch, kept_rows: Int32Array) -> DraftedTokens:
        """Draft from the head's own rows `kept_rows`; ValueError on a row that is none."""
        return self._run(self._body.further, self._own_rows, batch, kept_rows)

    @torch.inference_mode()
    def fused_rows(self, feature_rows: Int32Array) -> Float32Array:
        """Return what `first` makes of the target's rows; ValueError on a row that is none."""
        memory = self._kv.memory(KV_INDEX)
        batch = pack_rows([0] * len(feature_rows), memory.block_size)
        kept = _kept(self.target_features, batch, feature_rows)
        fused = self._body.fused(TorchStep(self._weights, self._numerics, memory, batch, kept))
        return fused.to(device="cpu", dtype=torch.float32).numpy()

    def first_from(self, batch: StepBatch, fused: Float32Array) -> DraftedTokens:
        """Draft from rows of `fused_rows`; ValueError on rows of another number or width."""
        check_fused(fused, batch.num_tokens, self.fused_width)
        memory = self._kv.memory(KV_INDEX)
        self._own_rows = [torch.tensor(fused, device=memory.device, dtype=memory.dtype)]
        return self.further(batch, np.arange(len(fused), dtype=np.int32))

    @torch.inference_mode()
    def _run(
        self,
        draft: Callable[[StepOps[Tensor]], Tensor],
        features: Sequence[Tensor],
        batch: StepBatch,
        rows: Int32Array,
    ) -> DraftedTokens:
        kept = _kept(features, batch, rows)
        step = TorchStep(self._weights, self._numerics, self._kv.memory(KV_INDEX), batch, kept)
        hidden_rows = draft(step)
        self._own_rows = step.features
        if not len(hidden_rows):
            return DraftedTokens(np.empty(0, np.int64), np.empty(0, np.float32))
        logits = self._body.logits(step, hidden_rows).to(device="cpu", dtype=torch.float32)
        columns = logits.argmax(dim=-1)
        shares = logits.softmax(dim=-1).gather(1, columns[:, None])[:, 0]
        ids = columns.numpy()
        return DraftedTokens(
            ids if self._draft_ids is None else self._draft_ids[ids], shares.numpy()
        )


def _kept(features: Sequence[Tensor], batch: StepBatch, rows: Int32Array) -> KeptFeatures:
    num_kept = len(features[0]) if features else 0
    if len(rows) != batch.num_tokens:
        raise ValueError(f"{len(rows)} kept rows for {batch.num_tokens} tokens")
    if any(not 0 <= row < num_kept for row in rows.tolist()):
        raise ValueError(f"kept rows must lie in [0, {num_kept})")
    return KeptFeatures(features, rows)


def draft_kv_group(head: DraftHead, dtype: str) -> KvGroup:
    """Return the group of the head's KV, in the element type that it computes in."""
    config = head.config
    if config.mla is not None:
        width, layers = config.mla.cached_width, config.num_layers
        return KvGroup(DRAFT_GROUP, layers, 1, width, dtype, values_in_keys=True)
    return KvGroup(DRAFT_GROUP, config.num_layers, config.num_kv_heads, config.head_dim, dtype)
