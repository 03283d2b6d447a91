"""Small random checkpoints of every architecture, as transformers models and as our own inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from twinfire.artifacts.model_config import ModelConfig, RopeConfig
from twinfire.artifacts.tensors import MappedTensor
from twinfire.protocol.errors import ModelError


class ArrayWeights:
    """A `WeightSource` over float32 arrays in memory."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self.arrays = arrays

    def __contains__(self, name: str) -> bool:
        return name in self.arrays

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def tensor(self, name: str) -> MappedTensor:
        if name not in self.arrays:
            raise ModelError(f"no tensor {name}")
        array = self.arrays[name]
        return MappedTensor(name, array.shape, "f32", array)

    @property
    def total_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


@dataclass(frozen=True)
class TinyModel:
    """The same weights on both sides."""

    config: ModelConfig
    weights: ArrayWeights
    reference: PreTrainedModel

    def reference_logits(self, token_ids: list[int]) -> np.ndarray:
        """Return transformers' logits [tokens, vocab] of one whole sequence."""
        with torch.inference_mode():
            logits = self.reference(torch.tensor([token_ids]), use_cache=False).logits[0]
        return logits.float().numpy()


_SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "attn_implementation": "eager",
    "tie_word_embeddings": False,
}
_BASE = ModelConfig(
    architecture="llama",
    vocab_size=131,
    hidden_size=48,
    intermediate_size=88,
    num_layers=3,
    num_heads=6,
    num_kv_heads=3,
    head_dim=16,
    rms_norm_eps=1e-5,
    max_position=1024,
    dtype="f32",
)
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
_YARN_ATTENTION_FACTOR = 0.1 * float(np.log(4.0)) + 1.0

TINY_MODEL_NAMES = (
    "llama",
    "llama_tied",
    "llama_biased",
    "llama_odd_heads",
    "llama_multi_query",
    "llama_rope_llama3",
    "llama_rope_linear",
    "llama_rope_yarn",
    "mistral",
    "mistral_window",
    "qwen2",
    "qwen2_window",
    "qwen3",
)


def tiny_model(name: str, seed: int = 0) -> TinyModel:
    """Return the model called `name`, one of TINY_MODEL_NAMES."""
    theirs, ours = _configs(name)
    torch.manual_seed(seed)
    reference = AutoModelForCausalLM.from_config(theirs).float().eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            # The usual tiny initial values would leave attention nearly uniform.
            noise = torch.randn_like(parameter)
            parameter.copy_(noise * 0.2 if parameter.ndim > 1 else 1.0 + noise * 0.2)
    state = {key: value.detach().numpy().copy() for key, value in reference.state_dict().items()}
    return TinyModel(ours, ArrayWeights(state), reference)


def _configs(name: str) -> tuple[Any, ModelConfig]:
    default_rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    if name.startswith("llama_rope_"):
        kind = name.removeprefix("llama_rope_")
        theirs, ours = _rope_variants()[kind]
        return LlamaConfig(**_SIZES, rope_parameters=theirs), replace(_BASE, rope=ours)
    sizes = _SIZES | default_rope
    windows = (24,) * 3
    variants: dict[str, tuple[Any, ModelConfig]] = {
        "llama": (LlamaConfig(**sizes), _BASE),
        "llama_tied": (
            LlamaConfig(**sizes | {"tie_word_embeddings": True}),
            replace(_BASE, tie_word_embeddings=True),
        ),
        "llama_biased": (
            LlamaConfig(**sizes, attention_bias=True, mlp_bias=True),
            replace(_BASE, qkv_bias=True, output_bias=True, mlp_bias=True),
        ),
        "llama_odd_heads": (
            LlamaConfig(
                **sizes | {"hidden_size": 42, "num_attention_heads": 7, "num_key_value_heads": 7}
            ),
            replace(_BASE, hidden_size=42, num_heads=7, num_kv_heads=7),
        ),
        "llama_multi_query": (
            LlamaConfig(
                **sizes | {"hidden_size": 45, "num_attention_heads": 5, "num_key_value_heads": 1}
            ),
            replace(_BASE, hidden_size=45, num_heads=5, num_kv_heads=1),
        ),
        "mistral": (
            MistralConfig(**sizes, sliding_window=None),
            replace(_BASE, architecture="mistral"),
        ),
        "mistral_window": (
            MistralConfig(**sizes, sliding_window=24),
            replace(_BASE, architecture="mistral", sliding_windows=windows),
        ),
        "qwen2": (Qwen2Config(**sizes), replace(_BASE, architecture="qwen2", qkv_bias=True)),
        "qwen2_window": (
            Qwen2Config(**sizes, use_sliding_window=True, sliding_window=24, max_window_layers=1),
            replace(_BASE, architecture="qwen2", qkv_bias=True, sliding_windows=(None, 24, 24)),
        ),
        "qwen3": (Qwen3Config(**sizes), replace(_BASE, architecture="qwen3", qk_norm=True)),
    }
    return variants[name]


def _rope_variants() -> dict[str, tuple[dict[str, Any], RopeConfig]]:
    return {
        "llama3": (
            _LLAMA3,
            RopeConfig(
                theta=500000.0,
                kind="llama3",
                factor=8.0,
                original_max_position=128,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
            ),
        ),
        "linear": (
            {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
            RopeConfig(kind="linear", factor=4.0),
        ),
        "yarn": (
            _YARN,
            RopeConfig(
                kind="yarn",
                factor=4.0,
                original_max_position=128,
                attention_factor=_YARN_ATTENTION_FACTOR,
            ),
        ),
    }


def tokens_of(seed: int, count: int) -> list[int]:
    """Return random tokens that every tiny model knows."""
    return np.random.default_rng(seed).integers(0, 131, count).tolist()
