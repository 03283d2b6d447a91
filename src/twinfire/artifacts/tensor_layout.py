"""Which tensors a configuration implies, and the check that a checkpoint has exactly those.

A tensor that is missing, extra or of another shape means that config and weights disagree, and
then the text would be wrong; it is found here, before anything is computed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Protocol

from twinfire.artifacts.model_config import ModelConfig
from twinfire.protocol.errors import ModelError

_BUFFERS = re.compile(r".*\.rotary_emb\.inv_freq")
"""Tensors that some exporters write although they follow from the configuration."""


class ShapedTensors(Protocol):
    """Named shapes."""

    def __contains__(self, name: str) -> bool:
        """Whether there is such a tensor."""
        ...

    def __iter__(self) -> Iterator[str]:
        """Yield every name."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        ...


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of the model; matrices are [out, in]."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.qkv_bias:
        layer["self_attn.q_proj.bias"] = (queries,)
        layer["self_attn.k_proj.bias"] = layer["self_attn.v_proj.bias"] = (keys,)
    if config.output_bias:
        layer["self_attn.o_proj.bias"] = (hidden,)
    if config.mlp_bias:
        layer["mlp.gate_proj.bias"] = layer["mlp.up_proj.bias"] = (inner,)
        layer["mlp.down_proj.bias"] = (hidden,)
    if config.qk_norm:
        layer["self_attn.q_norm.weight"] = layer["self_attn.k_norm.weight"] = (config.head_dim,)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings and config.pooling is None:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for index in range(config.num_layers):
        shapes.update({f"model.layers.{index}.{name}": shape for name, shape in layer.items()})
    return shapes


def check_tensors(config: ModelConfig, tensors: ShapedTensors, source: str) -> None:
    """Raise ModelError naming the first tensor that does not fit the configuration."""
    expected = expected_shapes(config)
    for name, shape in expected.items():
        if name not in tensors:
            raise ModelError(f"{source}: tensor '{name}' is missing; the configuration implies it")
        found = tensors.shape(name)
        if found != shape:
            raise ModelError(
                f"{source}: tensor '{name}' has shape {list(found)}, "
                f"the configuration implies {list(shape)}"
            )
    for name in tensors:
        redundant_head = name == "lm_head.weight" and name not in expected
        if name not in expected and not redundant_head and not _BUFFERS.fullmatch(name):
            raise ModelError(
                f"{source}: tensor '{name}' has no place in the configured {config.architecture} "
                f"of {config.num_layers} layers; computing without it would give wrong text"
            )
