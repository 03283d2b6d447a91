"""The tensors that a dense decoder is made of: names and shapes, checked before anything is packed.

A wrong or cut download is reported whole: every missing tensor and every wrong shape at once.
"""

from __future__ import annotations

from twinfire.artifacts.model_config import ModelConfig
from twinfire.artifacts.tensors import WeightSource
from twinfire.protocol.errors import ModelError

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
OUTPUT_HEAD = "lm_head.weight"
_MOST_NAMED = 8


def layer_prefix(layer: int) -> str:
    """Return what the names of a layer's tensors begin with."""
    return f"model.layers.{layer}."


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that the model needs, by name."""
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.vocab_size, config.hidden_size),
        FINAL_NORM: (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes[OUTPUT_HEAD] = (config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        prefix = layer_prefix(layer)
        shapes |= {prefix + name: shape for name, shape in _layer_shapes(config).items()}
    return shapes


def check_tensors(config: ModelConfig, weights: WeightSource) -> None:
    """Raise ModelError naming the tensors that are missing or of another shape."""
    shapes = expected_shapes(config)
    missing = [name for name in shapes if name not in weights]
    if missing:
        raise ModelError(f"the model lacks {len(missing)} tensors: {_listed(missing)}")
    wrong = [
        f"{name} is {list(actual)}, not {list(shape)}"
        for name, shape in shapes.items()
        if (actual := tuple(weights.tensor(name).shape)) != shape
    ]
    if wrong:
        raise ModelError(f"{len(wrong)} tensors do not fit the configuration: {_listed(wrong)}")


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.qkv_bias:
        shapes |= {
            "self_attn.q_proj.bias": (query,),
            "self_attn.k_proj.bias": (kv,),
            "self_attn.v_proj.bias": (kv,),
        }
    if config.output_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if config.mlp_bias:
        shapes |= {
            "mlp.gate_proj.bias": (inner,),
            "mlp.up_proj.bias": (inner,),
            "mlp.down_proj.bias": (hidden,),
        }
    if config.qk_norm:
        shapes |= {
            "self_attn.q_norm.weight": (config.head_dim,),
            "self_attn.k_norm.weight": (config.head_dim,),
        }
    return shapes


def _listed(items: list[str]) -> str:
    shown = ", ".join(items[:_MOST_NAMED])
    return shown if len(items) <= _MOST_NAMED else f"{shown} and {len(items) - _MOST_NAMED} more"
