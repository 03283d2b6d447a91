"""Weights of one model in torch's memory, by reference.

Implements `WeightOps` and `LatentWeightOps`. Owns packing; each matrix is read from its mapping
once and the unpacked copy dropped. Embedding rows on CPU are read from the mapping when asked for:
a tied table would otherwise lie in memory twice, packed and plain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from twinfire.artifacts.tensors import MappedTensor
from twinfire.kernels.latent_ops import PerHeadRef
from twinfire.kernels.ops import EmbeddingRef, LinearRef, RopeRef, RopeTable, VectorRef
from twinfire.kernels.step_batch import Int32Array
from twinfire.kernels.torch.dtypes import read_tensor
from twinfire.kernels.torch.linear import Linear, Packer, PerHeadLinear


class Embedding(Protocol):
    """A table [vocab, width]."""

    def __call__(self, token_ids: Int32Array) -> Tensor:
        """Return rows [len(token_ids), width]."""
        ...


@dataclass(frozen=True, slots=True)
class MappedEmbedding:
    """Rows converted from the mapped file as they are needed."""

    table: MappedTensor
    dtype: torch.dtype

    def __call__(self, token_ids: Int32Array) -> Tensor:
        """Return rows."""
        rows = MappedTensor(
            name=self.table.name,
            shape=(len(token_ids), self.table.shape[1]),
            format=self.table.format,
            raw=self.table.raw[token_ids],
        )
        return read_tensor(rows, self.dtype)


@dataclass(frozen=True, slots=True)
class ResidentEmbedding:
    """Rows of a table that lies in device memory."""

    table: Tensor

    def __call__(self, token_ids: Int32Array) -> Tensor:
        """Return rows."""
        ids = torch.from_numpy(token_ids.astype(np.int64)).to(self.table.device)
        return self.table.index_select(0, ids)


class TorchWeights:
    """All weights of a model. `on_bytes` is told of the disk bytes of each tensor once it is in."""

    def __init__(
        self,
        pack: Packer,
        dtype: torch.dtype,
        device: torch.device,
        on_bytes: Callable[[int], None],
        pack_per_head: Callable[[Tensor], Linear] = PerHeadLinear,
    ) -> None:
        self._pack = pack
        self._pack_per_head = pack_per_head
        self._dtype = dtype
        self._device = device
        self._on_bytes = on_bytes
        self._linears: list[Linear] = []
        self._vectors: list[Tensor] = []
        self._embeddings: list[Embedding] = []
        self._rope_tables: list[RopeTable] = []
        self._plain_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Memory of all weights; rows that stay in a mapped file are not counted."""
        return self._plain_bytes + sum(linear.num_bytes for linear in self._linears)

    def linear(
        self, parts: Sequence[MappedTensor], biases: Sequence[MappedTensor] = ()
    ) -> LinearRef:
        """Pack matrices one above the other."""
        weight = self._stacked(parts)
        bias = self._stacked(biases) if biases else None
        out_features, in_features = weight.shape
        self._linears.append(self._pack(weight, bias))
        return LinearRef(len(self._linears) - 1, in_features, out_features)

    def per_head(
        self, tensor: MappedTensor, num_heads: int, *, transposed: bool = False
    ) -> PerHeadRef:
        """Pack a matrix for each head."""
        by_head = self._stacked([tensor]).view(num_heads, -1, tensor.shape[1])
        weight = by_head.transpose(1, 2).contiguous() if transposed else by_head
        self._linears.append(self._pack_per_head(weight))
        _, out_features, in_features = weight.shape
        return PerHeadRef(len(self._linears) - 1, num_heads, in_features, out_features)

    def vector(self, tensor: MappedTensor) -> VectorRef:
        """Keep a vector."""
        vector = self._stacked([tensor])
        self._plain_bytes += vector.numel() * vector.element_size()
        self._vectors.append(vector)
        return VectorRef(len(self._vectors) - 1, vector.shape[0])

    def embedding(self, tensor: MappedTensor) -> EmbeddingRef:
        """Keep a table of rows."""
        if self._device.type == "cpu":
            self._embeddings.append(MappedEmbedding(tensor, self._dtype))
        else:
            table = self._stacked([tensor])
            self._plain_bytes += table.numel() * table.element_size()
            self._embeddings.append(ResidentEmbedding(table))
        return EmbeddingRef(len(self._embeddings) - 1, tensor.shape[1])

    def share_embedding(self, embedding: Embedding, width: int) -> EmbeddingRef:
        """Take a table of other weights, which keep it."""
        self._embeddings.append(embedding)
        return EmbeddingRef(len(self._embeddings) - 1, width)

    def rope(self, table: RopeTable) -> RopeRef:
        """Keep rotary frequencies."""
        self._rope_tables.append(table)
        return RopeRef(len(self._rope_tables) - 1)

    def linear_at(self, ref: LinearRef | PerHeadRef) -> Linear:
        """Return a packed matrix."""
        return self._linears[ref.index]

    def vector_at(self, ref: VectorRef) -> Tensor:
        """Return a vector."""
        return self._vectors[ref.index]

    def embedding_at(self, ref: EmbeddingRef) -> Embedding:
        """Return a table."""
        return self._embeddings[ref.index]

    def rope_at(self, ref: RopeRef) -> RopeTable:
        """Return rotary frequencies."""
        return self._rope_tables[ref.index]

    def _stacked(self, parts: Sequence[MappedTensor]) -> Tensor:
        pieces = []
        for part in parts:
            pieces.append(read_tensor(part, self._dtype).to(self._device))
            self._on_bytes(part.raw.nbytes)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
