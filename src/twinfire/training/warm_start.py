"""First values of a draft head: what it has in common with the target.

Its output head begins as the target's rows of the draft vocabulary, under the target's final norm;
the rest is random. With little text to learn from, those rows are most of what there is to know.
"""

from __future__ import annotations

import torch

from twinfire.artifacts.model_config import ModelConfig
from twinfire.artifacts.tensors import WeightSource
from twinfire.kernels.torch.dtypes import read_tensor
from twinfire.models.tensor_names import EMBEDDING, FINAL_NORM, OUTPUT_HEAD
from twinfire.training.draft_module import DraftModule


@torch.no_grad()
def start_from_target(
    module: DraftModule, config: ModelConfig, weights: WeightSource, draft_ids: torch.Tensor
) -> None:
    """Set the output head and the norm before it; their sizes are the target's."""
    head = EMBEDDING if config.tie_word_embeddings else OUTPUT_HEAD
    module.norm.weight.copy_(read_tensor(weights.tensor(FINAL_NORM), torch.float32))
    module.lm_head.weight.copy_(read_tensor(weights.tensor(head), torch.float32)[draft_ids])
