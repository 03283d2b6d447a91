"""First values of a draft head: what it has in common with the target.

Its output head begins as the target's rows of the draft vocabulary, under the target's final norm.
Where the sizes are the same its layer begins as the target's last one, reading the highest feature,
so that it works on states that those rows can read; the half of its input that is the next token's
embedding is random. With little text to learn from, that is most of what there is to know.
"""

from __future__ import annotations

import torch

from twinfire.artifacts.model_config import ModelConfig
from twinfire.artifacts.tensors import WeightSource
from twinfire.kernels.torch.dtypes import read_tensor
from twinfire.models.tensor_names import EMBEDDING, FINAL_NORM, OUTPUT_HEAD, layer_prefix
from twinfire.training.draft_module import DraftModule

_FEATURE_NOISE = 0.1
"""What is left of the random weights of the other features, against 1 of the highest."""


@torch.no_grad()
def start_from_target(
    module: DraftModule, config: ModelConfig, weights: WeightSource, draft_ids: torch.Tensor
) -> None:
    """Set what can be taken from the target; the head's width is the target's."""

    def tensor(name: str) -> torch.Tensor:
        return read_tensor(weights.tensor(name), torch.float32)

    module.norm.weight.copy_(tensor(FINAL_NORM))
    module.lm_head.weight.copy_(
        tensor(EMBEDDING if config.tie_word_embeddings else OUTPUT_HEAD)[draft_ids]
    )
    width = config.hidden_size
    if module.fc is not None:
        module.fc.weight.mul_(_FEATURE_NOISE)
        module.fc.weight[:, -width:] += torch.eye(width)
    prefix, layer = layer_prefix(config.num_layers - 1), module.midlayer
    for name in ("gate_proj", "up_proj", "down_proj"):
        _copy(getattr(layer.mlp, name).weight, tensor(f"{prefix}mlp.{name}.weight"))
    for name in ("q_proj", "k_proj", "v_proj"):
        taken = tensor(f"{prefix}self_attn.{name}.weight")
        _copy(getattr(layer.self_attn, name).weight[:, width:], taken)
    _copy(layer.self_attn.o_proj.weight, tensor(f"{prefix}self_attn.o_proj.weight"))
    _copy(layer.hidden_norm.weight, tensor(f"{prefix}input_layernorm.weight"))
    _copy(layer.post_attention_layernorm.weight, tensor(f"{prefix}post_attention_layernorm.weight"))


def _copy(own: torch.Tensor, taken: torch.Tensor) -> None:
    """Take values where the sizes agree."""
    if own.shape == taken.shape:
        own.copy_(taken)
