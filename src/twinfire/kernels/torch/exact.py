"""The exact strategy: float32 on CPU, every row the same bits whatever shares its step.

Whatever sums over an axis runs on tiles of one fixed shape, and elementwise steps use only ops
whose vector and remainder code round alike (`torch.sigmoid` and `torch.rsqrt` do not; exp, sqrt
and division do). Holds for a fixed number of threads on one machine.
"""

from __future__ import annotations

import torch
from torch import Tensor

from twinfire.kernels.ops import HeadLayout
from twinfire.kernels.step_batch import StepBatch
from twinfire.kernels.torch.exact_attention import ExactAttention
from twinfire.kernels.torch.kv_memory import KvMemory
from twinfire.kernels.torch.linear import (
    Linear,
    Packer,
    PerHeadLinear,
    TiledLinear,
    choose_packer,
)

_TILE_ROWS = 16
"""Enough for the multiply to run near its full rate, few enough not to waste a lone row's time."""


class ExactNumerics:
    """Arithmetic on fixed shapes."""

    def __init__(self) -> None:
        self._pack_one = choose_packer(torch.device("cpu"), torch.float32)

    @property
    def pack(self) -> Packer:
        """Makes the matrices' multiplies."""
        return self._pack_tiled

    def pack_per_head(self, weight: Tensor) -> Linear:
        """Return the multiply of [heads, out, in] with rows of [heads * in]."""
        return TiledLinear(PerHeadLinear(weight), _TILE_ROWS)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Norm the last axis."""
        mean_square = x.square().mean(dim=-1, keepdim=True)
        return x / torch.sqrt(mean_square + eps) * weight

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(first half) * second half."""
        gate, up = gate_up.chunk(2, dim=-1)
        gate = gate.contiguous()
        return gate / (1.0 + torch.exp(-gate)) * up

    def plan_attention(
        self, batch: StepBatch, heads: HeadLayout, window: int | None, kv: KvMemory
    ) -> ExactAttention:
        """Prepare a step's attention."""
        return ExactAttention(batch, heads, window, kv)

    def _pack_tiled(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return TiledLinear(self._pack_one(weight, bias), _TILE_ROWS)
