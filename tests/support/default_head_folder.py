"""A random draft head for the default model in a folder, in the layout of published ones."""

from __future__ import annotations

from pathlib import Path

import torch

from support.default_model import default_model_path
from support.draft_heads import write_head
from twinfire.artifacts.checkpoint import open_checkpoint

_DRAFT_VOCAB = 4096
_HEAD_DIM = 64
_INNER = 256


def write_default_head(folder: Path, seed: int = 0) -> Path:
    """Write one with the first tokens of the vocabulary as its own."""
    target = open_checkpoint(default_model_path()).config
    hidden, heads, kv_heads = target.hidden_size, target.num_heads, target.num_kv_heads
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        values = torch.randn((rows, columns), generator=generator) / columns**0.5
        return values.to(torch.bfloat16)

    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    tensors = {
        "fc.weight": matrix(hidden, 3 * hidden),
        "midlayer.self_attn.q_proj.weight": matrix(heads * _HEAD_DIM, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": matrix(kv_heads * _HEAD_DIM, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": matrix(kv_heads * _HEAD_DIM, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": matrix(hidden, heads * _HEAD_DIM),
        "midlayer.mlp.gate_proj.weight": matrix(_INNER, hidden),
        "midlayer.mlp.up_proj.weight": matrix(_INNER, hidden),
        "midlayer.mlp.down_proj.weight": matrix(hidden, _INNER),
        **{f"midlayer.{name}.weight": torch.ones(hidden, dtype=torch.bfloat16) for name in norms},
        "norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        "lm_head.weight": matrix(_DRAFT_VOCAB, hidden),
        "d2t": torch.zeros(_DRAFT_VOCAB, dtype=torch.int64),
    }
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": _INNER,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": _HEAD_DIM,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": _DRAFT_VOCAB,
        "torch_dtype": "bfloat16",
    }
    return write_head(folder, config, tensors)
