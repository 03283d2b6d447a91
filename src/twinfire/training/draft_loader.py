"""A draft head of any published layout as the module that training and probing compute with."""

from __future__ import annotations

import torch
from torch import Tensor

from twinfire.artifacts.draft_head import DraftHead
from twinfire.artifacts.draft_head_source import EMBEDDING as OWN_EMBEDDING
from twinfire.artifacts.tensors import WeightSource
from twinfire.kernels.torch.dtypes import read_tensor
from twinfire.models.rope import rope_table
from twinfire.models.tensor_names import EMBEDDING
from twinfire.protocol.errors import ModelError
from twinfire.training.draft_module import DraftModule, DraftShape


def load_draft_module(head: DraftHead) -> DraftModule:
    """Return the head in float32; ModelError for attention that is read but not computed."""
    config = head.config
    if config.attention != "llama":
        raise ModelError(
            f"the draft head's attention is {config.attention}; only llama heads are computed"
        )
    shape = DraftShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        draft_vocab_size=config.draft_vocab_size,
        rms_norm_eps=config.rms_norm_eps,
        num_features=len(config.feature_layers),
        target_hidden_size=config.target_hidden_size,
        num_layers=config.num_layers,
        norm_before_residual=config.norm_before_residual,
        norm_before_fc=config.norm_before_fc,
        fc_norm=config.fc_norm,
        norm_output=config.norm_output,
        uses_features=config.uses_features,
    )
    table = rope_table(config.rope, config.head_dim)
    module = DraftModule(shape, torch.tensor(table.inv_freq), table.attention_factor)
    module.load_state_dict(
        {
            name: read_tensor(head.weights.tensor(_one_name(name)), torch.float32)
            for name in module.state_dict()
        }
    )
    return module.eval().requires_grad_(False)


def draft_embedding(head: DraftHead, target: WeightSource) -> Tensor:
    """Return the table that the head embeds tokens with, [vocab, hidden] in bfloat16."""
    if OWN_EMBEDDING in head.weights:
        return read_tensor(head.weights.tensor(OWN_EMBEDDING), torch.bfloat16)
    return read_tensor(target.tensor(EMBEDDING), torch.bfloat16)


def target_token_ids(head: DraftHead) -> Tensor:
    """Return the target's token of each drafted id, [draft_vocab]."""
    if head.draft_ids is None:
        return torch.arange(head.config.draft_vocab_size)
    return torch.from_numpy(head.draft_ids)


def _one_name(name: str) -> str:
    first = "midlayer."
    return f"layers.0.{name.removeprefix(first)}" if name.startswith(first) else name
