"""A trained head on disk, in the layout that published EAGLE-3 heads have.

`config.json` and `model.safetensors` with `midlayer.*`, `fc`, `norm`, `lm_head`, `d2t` and `t2d`,
readable by whoever reads the heads of the paper's authors. The embedding is the target's own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file

from twinfire.artifacts.aux_layers import CONVENTION_FIELD, IDS_FIELD, LAYERS_PASSED
from twinfire.artifacts.model_config import ModelConfig, RopeConfig
from twinfire.artifacts.target_mark import MARK_FIELD, TargetMark
from twinfire.training.draft_module import DraftModule

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"


def write_draft_head(
    folder: Path,
    module: DraftModule,
    config: ModelConfig,
    draft_ids: torch.Tensor,
    feature_layers: Sequence[int],
    recipe: Mapping[str, object],
    mark: TargetMark,
) -> None:
    """Write the head in bfloat16; `recipe` and the target's `mark` go into the configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: value.detach().to(torch.bfloat16).contiguous()
        for name, value in module.state_dict().items()
    }
    draft_rows = torch.arange(len(draft_ids))
    in_draft = torch.zeros(config.vocab_size, dtype=torch.bool)
    in_draft[draft_ids] = True
    tensors["d2t"] = draft_ids.to(torch.int64) - draft_rows
    tensors["t2d"] = in_draft
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / CONFIG_FILE).write_text(
        json.dumps(_published_config(module, config, feature_layers, recipe, mark), indent=2) + "\n"
    )


def _published_config(
    module: DraftModule,
    config: ModelConfig,
    feature_layers: Sequence[int],
    recipe: Mapping[str, object],
    mark: TargetMark,
) -> dict[str, object]:
    shape = module.shape
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "target_hidden_size": config.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": _rope_scaling(config.rope),
        "max_position_embeddings": config.max_position,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "norm_before_residual": shape.norm_before_residual,
        "norm_before_fc": shape.norm_before_fc,
        "fc_norm": shape.fc_norm,
        "norm_output": shape.norm_output,
        "eagle_config": {
            IDS_FIELD: list(feature_layers),
            CONVENTION_FIELD: LAYERS_PASSED,
            "use_aux_hidden_state": shape.uses_features,
        },
        MARK_FIELD: msgspec.to_builtins(mark),
        "twinfire_recipe": dict(recipe),
    }


def _rope_scaling(rope: RopeConfig) -> dict[str, object] | None:
    """Return the field's value for the rope that the head was trained with, the target's."""
    common: dict[str, object] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind in ("llama3", "yarn"):
        common["original_max_position_embeddings"] = rope.original_max_position
    if rope.kind == "llama3":
        factors = {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
        }
        return {**common, **factors}
    if rope.kind == "yarn":
        betas = {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        return {**common, **betas, "attention_factor": rope.attention_factor}
    return None if rope.kind == "default" else common
