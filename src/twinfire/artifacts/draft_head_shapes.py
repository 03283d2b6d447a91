"""Which tensors a head's configuration implies, and the check that its file has exactly those."""

from __future__ import annotations

from twinfire.artifacts.draft_head_config import DraftHeadConfig
from twinfire.artifacts.draft_head_source import DRAFT_IDS, EMBEDDING, OUTPUT_HEAD, DraftHeadSource
from twinfire.protocol.errors import ModelError

Shapes = dict[str, tuple[int, ...]]


def draft_head_shapes(config: DraftHeadConfig) -> Shapes:
    """Return name and shape of every tensor that must be there; matrices are [out, in]."""
    hidden, target, inner = config.hidden_size, config.target_hidden_size, config.intermediate_size
    num_features = len(config.feature_layers)
    shapes: Shapes = {
        "norm.weight": (hidden,),
        OUTPUT_HEAD: (config.draft_vocab_size, hidden),
        "layers.0.hidden_norm.weight": (hidden,),
    }
    if config.uses_features:
        shapes["fc.weight"] = (hidden, num_features * target)
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (num_features * target,)
    if config.fc_norm:
        shapes.update({f"fc_norm.{index}.weight": (target,) for index in range(num_features)})
    for index in range(config.num_layers):
        layer: Shapes = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
            **_attention(config, hidden if index else 2 * hidden),
        }
        shapes.update({f"layers.{index}.{name}": shape for name, shape in layer.items()})
    return shapes


def _attention(config: DraftHeadConfig, width: int) -> Shapes:
    heads, hidden, mla = config.num_heads, config.hidden_size, config.mla
    if mla is None:
        queries, keys = heads * config.head_dim, config.num_kv_heads * config.head_dim
        shapes: Shapes = {
            "q_proj.weight": (queries, width),
            "k_proj.weight": (keys, width),
            "v_proj.weight": (keys, width),
            "o_proj.weight": (hidden, queries),
        }
    else:
        latent = mla.kv_lora_rank
        queries = heads * config.head_dim
        shapes = {
            "kv_a_proj_with_mqa.weight": (latent + mla.qk_rope_head_dim, width),
            "kv_a_layernorm.weight": (latent,),
            "kv_b_proj.weight": (heads * (mla.qk_nope_head_dim + mla.v_head_dim), latent),
            "o_proj.weight": (hidden, heads * mla.v_head_dim),
        }
        if mla.q_lora_rank is None:
            shapes["q_proj.weight"] = (queries, width)
        else:
            shapes["q_a_proj.weight"] = (mla.q_lora_rank, width)
            shapes["q_a_layernorm.weight"] = (mla.q_lora_rank,)
            shapes["q_b_proj.weight"] = (queries, mla.q_lora_rank)
    return {f"self_attn.{name}": shape for name, shape in shapes.items()}


def check_draft_head(config: DraftHeadConfig, source: DraftHeadSource) -> None:
    """Raise ModelError naming a tensor that is missing, misshapen or has no place."""
    expected = draft_head_shapes(config)
    for name, wanted in expected.items():
        if name not in source:
            raise ModelError(f"{source.folder}: tensor '{name}' is missing; wanted {list(wanted)}")
        _check_shape(source, name, wanted)
    known = {*expected, EMBEDDING, DRAFT_IDS}
    for name in source:
        if name not in known:
            raise ModelError(
                f"{source.folder}: tensor '{name}' has no place in an EAGLE-3 head of "
                f"{config.num_layers} layers; drafting without it would be wrong"
            )
    if DRAFT_IDS in source:
        _check_shape(source, DRAFT_IDS, (config.draft_vocab_size,))


def _check_shape(source: DraftHeadSource, name: str, wanted: tuple[int, ...]) -> None:
    found = source.shape(name)
    if found != wanted:
        raise ModelError(
            f"{source.folder}: tensor '{name}' has shape {list(found)}, wanted {list(wanted)} by "
            "the head's configuration and the target's sizes"
        )
