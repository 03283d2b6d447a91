"""The op set that models are written over: what a decoder layer is made of, and nothing smaller.

Two halves: `WeightOps` takes weights once and hands out references; `StepOps` computes one step
with them. Ops are pure data flow on opaque handles of `[rows, width]` activations, so a sibling
may execute each at once or record them, run the model once and replay the program for every later
step. Hence no op returns a number to Python, and a model must never branch on anything but its
configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from twinfire.artifacts.tensors import MappedTensor

A = TypeVar("A")
"""An activation handle: `[rows, width]` in the op set's own element type and memory."""


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """How a fused row `[q heads | k heads | v heads]` is divided. Widths in elements."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None
    """Where a row has no v heads: how much of a key, from its beginning, is its value."""

    @property
    def query_width(self) -> int:
        """Elements of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Elements of all key heads, which is also that of all value heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def fused_width(self) -> int:
        """Elements of a whole row."""
        num_arrays = 2 if self.value_dim is None else 1
        return self.query_width + num_arrays * self.kv_width

    @property
    def attended_width(self) -> int:
        """Elements of what attention returns for a row."""
        return self.num_heads * (self.value_dim or self.head_dim)

    @property
    def queries_per_kv_head(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Rotary frequencies of a model, before any position is known."""

    inv_freq: npt.NDArray[np.float32]
    """[head_dim / 2] radians per token."""
    attention_factor: float
    """Multiplies cos and sin."""


@dataclass(frozen=True, slots=True)
class LinearRef:
    """A packed matrix `[out_features, in_features]` with an optional bias."""

    index: int
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class VectorRef:
    """A vector `[width]`."""

    index: int
    width: int


@dataclass(frozen=True, slots=True)
class EmbeddingRef:
    """A table `[vocab, width]` from which rows are read."""

    index: int
    width: int


@dataclass(frozen=True, slots=True)
class RopeRef:
    """A rotary table."""

    index: int


class WeightOps(Protocol):
    """Takes weights while a model is built. References are valid in the same set's `StepOps`."""

    def linear(
        self, parts: Sequence[MappedTensor], biases: Sequence[MappedTensor] = ()
    ) -> LinearRef:
        """Pack matrices `[rows_i, in]` one above the other, with all their biases or none."""
        ...

    def vector(self, tensor: MappedTensor) -> VectorRef:
        """Keep a vector."""
        ...

    def embedding(self, tensor: MappedTensor) -> EmbeddingRef:
        """Keep a table of rows."""
        ...

    def rope(self, table: RopeTable) -> RopeRef:
        """Keep rotary frequencies."""
        ...


class StepOps(Protocol[A]):
    """Computes one step of T tokens. An op may overwrite its inputs: use only what it returns."""

    def embed(self, table: EmbeddingRef) -> A:
        """Return the rows of the step's token ids, [T, width]."""
        ...

    def rms_norm(self, x: A, weight: VectorRef, eps: float) -> A:
        """Return x / sqrt(mean(x**2) + eps) * weight, each row by itself (arXiv:1910.07467)."""
        ...

    def add_rms_norm(self, x: A, residual: A, weight: VectorRef, eps: float) -> tuple[A, A]:
        """Return (rms_norm(x + residual), x + residual)."""
        ...

    def linear(self, x: A, weight: LinearRef) -> A:
        """Return x @ weight.T + bias, [rows, out_features]."""
        ...

    def head_norm(
        self, qkv: A, heads: HeadLayout, query: VectorRef, key: VectorRef, eps: float
    ) -> A:
        """Return qkv with `rms_norm` applied to every query head and every key head."""
        ...

    def rope(self, qkv: A, heads: HeadLayout, table: RopeRef) -> A:
        """Return qkv with queries and keys turned by their positions (arXiv:2104.09864).

        Element i of a head is paired with element i + head_dim / 2.
        """
        ...

    def write_kv(self, qkv: A, heads: HeadLayout, layer: int) -> None:
        """Store keys and values of `layer` at the step's slots."""
        ...

    def attention(
        self, qkv: A, heads: HeadLayout, layer: int, window: int | None, scale: float
    ) -> A:
        """Attend each query to its sequence's stored keys up to its own position.

        Returns [T, attended_width].
        With a `window` only the last `window` positions, its own included, are seen.
        `write_kv` of the same layer comes first.
        """
        ...

    def silu_mul(self, gate_up: A) -> A:
        """Return silu(first half) * second half of each row."""
        ...

    def keep_feature(self, x: A, index: int) -> None:
        """Keep a copy of all rows as the step's feature number `index`; x stays as it is."""
        ...

    def kept_feature(self, index: int, width: int) -> A:
        """Return rows [T, width] of feature `index` of the step that this one was told to read."""
        ...

    def concat(self, parts: Sequence[A]) -> A:
        """Return the rows side by side, [rows, sum of widths]."""
        ...

    def take_logit_rows(self, x: A) -> A:
        """Return the R rows whose logits the step wants."""
        ...
