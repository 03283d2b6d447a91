"""Rotary frequencies of every supported kind, in float64 and rounded once.

Computes what does not depend on a position; the op set turns it into cos and sin.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from twinfire.artifacts.model_config import RopeConfig
from twinfire.kernels.ops import RopeTable
from twinfire.protocol.errors import ModelError

Float64Array = npt.NDArray[np.float64]


def rope_table(rope: RopeConfig, head_dim: int) -> RopeTable:
    """Return the table for heads of `head_dim` elements; ModelError on an impossible setting."""
    if head_dim % 2:
        raise ModelError(f"head_dim {head_dim} is odd; rotary embedding pairs its elements")
    inv_freq = _plain(rope.theta, head_dim)
    if rope.kind == "linear":
        inv_freq = inv_freq / rope.factor
    elif rope.kind == "llama3":
        inv_freq = _llama3(inv_freq, rope)
    elif rope.kind == "yarn":
        inv_freq = _yarn(inv_freq, rope, head_dim)
    elif rope.kind != "default":
        raise ModelError(f"unknown rope kind {rope.kind!r}; known: default, linear, llama3, yarn")
    return RopeTable(inv_freq.astype(np.float32), rope.attention_factor)


def _plain(theta: float, head_dim: int) -> Float64Array:
    """theta ** (-2i / d) (RoFormer, arXiv:2104.09864, section 3.2.2)."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    return np.asarray(theta**-exponents)


def _llama3(inv_freq: Float64Array, rope: RopeConfig) -> Float64Array:
    """Slow frequencies divided by `factor`, fast ones kept, a straight line between.

    The scaling that the Llama 3.1 model card names `rope_type: llama3`.
    """
    _need_original_window(rope)
    wavelengths = 2 * math.pi / inv_freq
    turns = rope.original_max_position / wavelengths
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = np.clip(kept, 0.0, 1.0)
    return (1 - kept) * inv_freq / rope.factor + kept * inv_freq


def _yarn(inv_freq: Float64Array, rope: RopeConfig, head_dim: int) -> Float64Array:
    """NTK-by-parts interpolation (YaRN, arXiv:2309.00071, section 3.2)."""
    _need_original_window(rope)

    def dimension_with_turns(turns: float) -> float:
        # The pair that turns `turns` times over the original window.
        return (
            head_dim
            * math.log(rope.original_max_position / (turns * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low = max(math.floor(dimension_with_turns(rope.beta_fast)), 0)
    high = min(math.ceil(dimension_with_turns(rope.beta_slow)), head_dim - 1)
    width = max(high - low, 0.001)
    interpolated = np.clip((np.arange(head_dim // 2) - low) / width, 0.0, 1.0)
    return inv_freq / rope.factor * interpolated + inv_freq * (1 - interpolated)


def _need_original_window(rope: RopeConfig) -> None:
    if rope.original_max_position <= 0:
        raise ModelError(f"rope kind {rope.kind!r} needs original_max_position above 0")
