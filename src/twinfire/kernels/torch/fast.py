"""The fast strategy, for 16-bit elements on CPU and for any on GPU.

Sums run in whatever order the device's multiply finds best, so a row's last bits may move with
the batch; in bf16 that is one unit in 256, and two tokens whose logits are closer than this may
swap.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from twinfire.kernels.ops import HeadLayout
from twinfire.kernels.step_batch import StepBatch
from twinfire.kernels.torch.fast_attention import FastAttention
from twinfire.kernels.torch.kv_memory import KvMemory
from twinfire.kernels.torch.linear import Linear, Packer, PerHeadLinear, choose_packer
from twinfire.kernels.torch.scratch import Scratch


class FastNumerics:
    """Whole-batch arithmetic."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._pack = choose_packer(device, dtype)
        self._scratch = Scratch(device)

    @property
    def pack(self) -> Packer:
        """Makes the matrices' multiplies."""
        return self._pack

    def pack_per_head(self, weight: Tensor) -> Linear:
        """Return the multiply of [heads, out, in] with rows of [heads * in]."""
        return PerHeadLinear(weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Norm the last axis."""
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(first half) * second half."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def plan_attention(
        self, batch: StepBatch, heads: HeadLayout, window: int | None, kv: KvMemory
    ) -> FastAttention:
        """Prepare a step's attention."""
        return FastAttention(batch, heads, window, kv, self._scratch)
