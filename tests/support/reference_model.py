"""transformers' own model with the weights of any checkpoint of ours."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from twinfire.artifacts.checkpoint import Checkpoint


def llama_reference(checkpoint: Checkpoint) -> LlamaForCausalLM:
    """Return a float32 model; only for plain Llama settings, as the default model has."""
    config = checkpoint.config
    assert config.architecture == "llama"
    assert config.rope.kind == "default"
    theirs = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position,
        tie_word_embeddings=config.tie_word_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
    )
    model = LlamaForCausalLM(theirs).float().eval()
    weights = checkpoint.weights
    state = {name: torch.tensor(weights.tensor(name).to_float32()) for name in weights}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    model.tie_weights()
    return model
