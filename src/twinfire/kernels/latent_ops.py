"""What latent attention (MLA; DeepSeek-V2, arXiv:2405.04434) needs beyond the common ops.

Not every op set has these: a model asks before it takes its weights, and says so where they are
missing. With them keys and values are never made of the latent rows that the cache holds: queries
are taken to the latent space instead, and what was attended is taken back, head by head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from twinfire.artifacts.tensors import MappedTensor
from twinfire.kernels.ops import A


@dataclass(frozen=True, slots=True)
class PerHeadRef:
    """A packed matrix for each head, `[num_heads, out_features, in_features]`."""

    index: int
    num_heads: int
    in_features: int
    out_features: int


@runtime_checkable
class LatentWeightOps(Protocol):
    """Beside `WeightOps`."""

    def per_head(
        self, tensor: MappedTensor, num_heads: int, *, transposed: bool = False
    ) -> PerHeadRef:
        """Pack a matrix [num_heads * out, in], or [num_heads * in, out] if `transposed`."""
        ...


class LatentStepOps(Protocol[A]):
    """Beside `StepOps`. `linear` and `rms_norm` of such a set leave their inputs as they are."""

    def per_head(self, x: A, weight: PerHeadRef) -> A:
        """Multiply each head of x [rows, num_heads * in] by its own, [rows, num_heads * out]."""
        ...

    def join_heads(self, parts: Sequence[A], num_heads: int) -> A:
        """Return rows in which the parts of a head, [rows, num_heads * width], are neighbours."""
        ...
