"""Small draft heads in the layouts of published ones, over a target of small sizes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from twinfire.artifacts.model_config import ModelConfig

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 32, 48, 4, 2, 8
VOCAB, DRAFT_VOCAB = 120, 40
TARGET = ModelConfig(
    architecture="llama",
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=INNER,
    num_layers=16,
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    rms_norm_eps=1e-5,
    max_position=512,
)
LLAMA_SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
}


def random_tensors(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).to(torch.bfloat16)
        for name, shape in shapes.items()
    }


def layer_shapes(prefix: str, width: int = 2 * HIDDEN) -> dict[str, tuple[int, ...]]:
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    return {
        f"{prefix}.self_attn.q_proj.weight": (queries, width),
        f"{prefix}.self_attn.k_proj.weight": (keys, width),
        f"{prefix}.self_attn.v_proj.weight": (keys, width),
        f"{prefix}.self_attn.o_proj.weight": (HIDDEN, queries),
        f"{prefix}.mlp.gate_proj.weight": (INNER, HIDDEN),
        f"{prefix}.mlp.up_proj.weight": (INNER, HIDDEN),
        f"{prefix}.mlp.down_proj.weight": (HIDDEN, INNER),
        f"{prefix}.input_layernorm.weight": (HIDDEN,),
        f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
    }


def head_shapes(layer: str, body: str = "", draft_vocab: int = DRAFT_VOCAB) -> dict[str, Any]:
    """Return the tensors of a head whose one layer is called `layer`."""
    return {
        f"{body}fc.weight": (HIDDEN, 3 * HIDDEN),
        **layer_shapes(layer),
        f"{layer}.hidden_norm.weight": (HIDDEN,),
        f"{body}norm.weight": (HIDDEN,),
        "lm_head.weight": (draft_vocab, HIDDEN),
    }


def vocabulary_maps() -> dict[str, Tensor]:
    """Return d2t and t2d of a draft vocabulary of every third token."""
    ids = torch.arange(DRAFT_VOCAB) * 3
    in_draft = torch.zeros(VOCAB, dtype=torch.bool)
    in_draft[ids] = True
    return {"d2t": ids - torch.arange(DRAFT_VOCAB), "t2d": in_draft}


def write_head(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], *, as_bin: bool = False
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if as_bin:
        torch.save(dict(tensors), folder / "pytorch_model.bin")
    else:
        save_file(dict(tensors), folder / "model.safetensors")
    return folder


def yuhuili_config(**changed: Any) -> dict[str, Any]:
    """The fields of yuhuili/EAGLE3-LLaMA3.1-Instruct-8B's config.json, at small sizes."""
    return {
        **LLAMA_SIZES,
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": DRAFT_VOCAB,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        **changed,
    }


def yuhuili_tensors() -> dict[str, Tensor]:
    return {**random_tensors(head_shapes("midlayer")), **vocabulary_maps()}
