"""What a target model computes for texts that are given whole: features, and the final state.

Runs the served model's own body over the torch op set, many texts packed into one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from twinfire.artifacts.model_config import ModelConfig
from twinfire.artifacts.tensors import WeightSource
from twinfire.cache.kv_group import BLOCK_SIZE, KvGroup
from twinfire.kernels.step_batch import StepBatch
from twinfire.kernels.torch.fast import FastNumerics
from twinfire.kernels.torch.kv_memory import KvMemory
from twinfire.kernels.torch.step import TorchStep
from twinfire.kernels.torch.weights import TorchWeights
from twinfire.models.registry import build_model


@dataclass(frozen=True, slots=True)
class TextStates:
    """Of one text of T tokens, in bfloat16."""

    features: Tensor
    """[T, len(feature_layers) * hidden]: the residual stream after so many layers, in order."""
    final: Tensor
    """[T, hidden]: normed, what the output head reads."""


class TargetStates:
    """A loaded target. `feature_layers` are numbers of layers passed, 0 being the embedding."""

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        feature_layers: Sequence[int],
        *,
        max_tokens: int = 2048,
    ) -> None:
        """Load in bfloat16 on CPU. `max_tokens` bounds the texts of one step."""
        device, element = torch.device("cpu"), torch.bfloat16
        self.max_tokens = max_tokens
        self._numerics = FastNumerics(device, element)
        self._weights = TorchWeights(self._numerics.pack, element, device, lambda _: None)
        self._model = build_model(config, weights, self._weights)
        self._feature_layers = tuple(feature_layers)
        group = KvGroup("target", config.num_layers, config.num_kv_heads, config.head_dim, "bf16")
        # Each text may leave a block unfinished.
        self._num_blocks = 2 * (max_tokens // BLOCK_SIZE + 1)
        self._kv = KvMemory(group, self._num_blocks, BLOCK_SIZE, device)

    def num_fitting(self, lengths: Sequence[int]) -> int:
        """Return how many of the first texts of these lengths one step takes."""
        tokens = np.cumsum(lengths)
        blocks = np.cumsum([-(-length // BLOCK_SIZE) for length in lengths])
        return int(np.sum((tokens <= self.max_tokens) & (blocks <= self._num_blocks)))

    @torch.inference_mode()
    def compute(self, texts: Sequence[Sequence[int]]) -> list[TextStates]:
        """Return the states of each text; together they fit (`num_fitting`)."""
        batch = _packed(texts, self._num_blocks)
        step = TorchStep(self._weights, self._numerics, self._kv, batch)
        final = self._model.hidden_rows(step, self._feature_layers)
        features = torch.cat(step.features, dim=1)
        ends = np.cumsum([len(text) for text in texts]).tolist()
        return [
            TextStates(
                features[end - len(text) : end].clone(), final[end - len(text) : end].clone()
            )
            for text, end in zip(texts, ends, strict=True)
        ]


def _packed(texts: Sequence[Sequence[int]], num_blocks: int) -> StepBatch:
    lengths = [len(text) for text in texts]
    widest = max(-(-length // BLOCK_SIZE) for length in lengths)
    tables = np.zeros((len(texts), widest), np.int32)
    slots: list[np.ndarray] = []
    next_block = 0
    for row, length in enumerate(lengths):
        count = -(-length // BLOCK_SIZE)
        tables[row, :count] = np.arange(next_block, next_block + count)
        slots.append(next_block * BLOCK_SIZE + np.arange(length))
        next_block += count
    if next_block > num_blocks:
        raise ValueError(f"{sum(lengths)} tokens in {len(texts)} texts do not fit one step")
    total = sum(lengths)
    return StepBatch(
        token_ids=np.concatenate([np.asarray(text, np.int32) for text in texts]),
        positions=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        slots=np.concatenate(slots).astype(np.int32),
        query_starts=np.cumsum([0, *lengths]).astype(np.int32),
        context_lens=np.asarray(lengths, np.int32),
        block_tables=tables,
        logit_rows=np.arange(total, dtype=np.int32),
        block_copies=np.zeros((0, 2), np.int32),
    )
