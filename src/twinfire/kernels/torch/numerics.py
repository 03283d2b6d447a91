"""The interface of a numeric strategy: how rows are multiplied, normed and attended.

Siblings are `exact` and `fast`; whoever loads a model picks one by element type and device.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from twinfire.kernels.ops import HeadLayout
from twinfire.kernels.step_batch import StepBatch
from twinfire.kernels.torch.kv_memory import KvMemory
from twinfire.kernels.torch.linear import Linear, Packer


class Attention(Protocol):
    """Attention of one step for one window, planned and ready for every layer."""

    def __call__(self, queries: Tensor, layer: int, scale: float) -> Tensor:
        """Attend [T, query_width] to stored keys and values; returns [T, attended_width]."""
        ...


class Numerics(Protocol):
    """Row-wise arithmetic in one element type."""

    @property
    def pack(self) -> Packer:
        """Makes the matrices' multiplies."""
        ...

    def pack_per_head(self, weight: Tensor) -> Linear:
        """Return the multiply of [heads, out, in] with rows of [heads * in]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Norm the last axis."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(first half) * second half of the last axis."""
        ...

    def plan_attention(
        self, batch: StepBatch, heads: HeadLayout, window: int | None, kv: KvMemory
    ) -> Attention:
        """Prepare a step's attention."""
        ...
