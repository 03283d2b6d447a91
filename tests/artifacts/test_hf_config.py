"""`config.json` as transformers understands it, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from support.checkpoint_files import HF_CONFIG, write_json
from twinfire.artifacts.hf_config import read_hf_config
from twinfire.artifacts.model_config import GenerationDefaults, ModelConfig, RopeConfig
from twinfire.artifacts.rope_config import llama3_freq_factors
from twinfire.protocol.errors import ModelError

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN_ROPE = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


def read(folder: Path, **changed: Any) -> ModelConfig:
    """Read HF_CONFIG with fields changed; None removes one."""
    fields = {name: value for name, value in {**HF_CONFIG, **changed}.items() if value is not None}
    write_json(folder / "config.json", fields)
    return read_hf_config(folder, lambda: "f16")


SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}


@pytest.mark.parametrize(
    "reference",
    [
        LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
        LlamaConfig(**SIZES, rope_parameters={"rope_theta": 5e5, **LLAMA3_ROPE}),
        MistralConfig(**SIZES, sliding_window=1024, head_dim=32),
        MistralConfig(**SIZES, sliding_window=None, head_dim=16),
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=256, max_window_layers=1),
        Qwen2Config(**SIZES, tie_word_embeddings=True),
        Qwen3Config(**SIZES, head_dim=32, attention_bias=True),
        Qwen3Config(**SIZES, head_dim=32, rope_parameters={"rope_theta": 1e6, **YARN_ROPE}),
    ],
    ids=lambda config: config.model_type,
)
def test_what_transformers_saves_is_read_alike(tmp_path: Path, reference: PreTrainedConfig) -> None:
    names = {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
    }
    reference.architectures = [names[reference.model_type]]
    reference.save_pretrained(tmp_path)
    config = read_hf_config(tmp_path, lambda: "f16")
    assert config.architecture == reference.model_type
    assert config.num_layers == 3
    assert config.num_kv_heads == reference.num_key_value_heads
    assert config.head_dim == (getattr(reference, "head_dim", None) or 16)
    assert config.rms_norm_eps == reference.rms_norm_eps
    assert config.tie_word_embeddings == reference.tie_word_embeddings
    assert config.rope.theta == reference.rope_parameters["rope_theta"]
    assert config.qkv_bias == (
        reference.model_type == "qwen2" or bool(getattr(reference, "attention_bias", False))
    )
    assert config.qk_norm == (reference.model_type == "qwen3")
    expected = [None] * 3
    if getattr(reference, "sliding_window", None) is not None:
        layer_types = getattr(reference, "layer_types", None) or ["sliding_attention"] * 3
        window = reference.sliding_window
        expected = [window if kind == "sliding_attention" else None for kind in layer_types]
    assert [config.window_of(layer) for layer in range(3)] == expected


def rotary_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Return inverse frequencies by the published formulas."""
    plain = rope.theta ** -(np.arange(0, head_dim, 2) / head_dim)
    if rope.kind == "llama3":
        return plain / llama3_freq_factors(rope, head_dim)
    return plain / (rope.factor if rope.kind == "linear" else 1.0)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 2.5},
        LLAMA3_ROPE,
        {**LLAMA3_ROPE, "factor": 32.0, "low_freq_factor": 2.0},
        YARN_ROPE,
        {**YARN_ROPE, "attention_factor": 0.7},
        {**YARN_ROPE, "mscale": 0.9, "mscale_all_dim": 0.4},
    ],
)
def test_rope_scaling_means_what_it_means_to_transformers(
    tmp_path: Path, scaling: dict[str, Any]
) -> None:
    rope = read(tmp_path, rope_scaling=scaling, rope_theta=5e5).rope
    sizes = {**SIZES, "max_position_embeddings": 512}
    reference = LlamaConfig(**sizes, rope_parameters={**scaling, "rope_theta": 5e5})
    kind = str(reference.rope_parameters["rope_type"])
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS[kind](reference, "cpu")
    assert rope.kind == kind
    assert rope.attention_factor == pytest.approx(attention_factor)
    if kind != "yarn":
        np.testing.assert_allclose(rotary_frequencies(rope, 16), frequencies.numpy(), rtol=1e-5)
    else:
        assert (rope.factor, rope.original_max_position) == (4.0, 512)


def test_older_and_newer_rope_fields_are_equal(tmp_path: Path) -> None:
    old = read(tmp_path, rope_theta=5e5, rope_scaling={**LLAMA3_ROPE, "type": "llama3"})
    new = read(tmp_path, rope_theta=None, rope_parameters={**LLAMA3_ROPE, "rope_theta": 5e5})
    assert old.rope == new.rope
    assert old.rope.kind == "llama3"


def test_yarn_widens_the_window(tmp_path: Path) -> None:
    assert read(tmp_path, rope_scaling=YARN_ROPE).max_position == 2048


def test_the_window_beyond_the_models_own_is_full_attention(tmp_path: Path) -> None:
    fields = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    assert read(tmp_path, **fields, sliding_window=4096).sliding_windows == ()
    assert read(tmp_path, **fields, sliding_window=128).sliding_windows == (128, 128)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"model_type": "gpt2"},
            "'gpt2' is not supported; supported: llama, mistral, qwen2, qwen3",
        ),
        ({"model_type": None}, "'model_type' is missing"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' is 0"),
        ({"vocab_size": "many"}, "'vocab_size' must be an integer"),
        ({"vocab_size": True}, "'vocab_size' must be an integer"),
        ({"vocab_size": 2**40}, "'vocab_size' is"),
        ({"num_key_value_heads": 3}, "'num_key_value_heads' is 3, which does not divide"),
        ({"num_attention_heads": 6, "num_key_value_heads": 6}, "'num_attention_heads' is 6"),
        ({"head_dim": 15}, "'head_dim' is 15"),
        ({"rms_norm_eps": 0}, "'rms_norm_eps' is 0"),
        ({"rope_theta": "big"}, "'rope_theta' must be a number"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "'rope_type' is 'dynamic'; supported"),
        ({"rope_scaling": {"type": "longrope", "factor": 2}}, "longrope"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: field 'factor' is missing"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "'low_freq_factor' is missing"),
        ({"rope_scaling": {**YARN_ROPE, "truncate": False}}, "'truncate' is false"),
        ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor' must be 1"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "between layer types"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'quantization_config' is .*gptq"),
        ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu'"),
        ({"torch_dtype": "float8_e4m3fn"}, "'torch_dtype' is 'float8_e4m3fn'"),
        ({"eos_token_id": 320}, "'eos_token_id' has 320, outside the vocabulary"),
        ({"eos_token_id": ["a"]}, "'eos_token_id' must be a token id"),
    ],
)
def test_a_bad_field_is_named(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        read(tmp_path, **changed)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"max_window_layers": None}, "'max_window_layers' is missing"),
        ({"layer_types": ["full_attention"]}, "'layer_types' has 1 entries for 2 layers"),
        ({"layer_types": ["full_attention", "chunked"]}, "'layer_types' has 'chunked'"),
    ],
)
def test_bad_windows_are_named(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    fields = {
        **{"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
        **{"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
    }
    with pytest.raises(ModelError, match=message):
        read(tmp_path, **{**fields, **changed})


def test_generation_config_gives_end_tokens_and_defaults(tmp_path: Path) -> None:
    write_json(
        tmp_path / "generation_config.json",
        {"eos_token_id": [5, 7, 5], "temperature": 0.6, "top_p": 0.9, "top_k": 20},
    )
    config = read(tmp_path)
    assert config.eos_token_ids == (5, 7)
    assert config.bos_token_id == 1
    assert config.generation == GenerationDefaults(temperature=0.6, top_p=0.9, top_k=20)


def test_what_is_silent_is_looked_up_elsewhere(tmp_path: Path) -> None:
    config = read(tmp_path, torch_dtype=None, eos_token_id=None, num_key_value_heads=None)
    assert config.dtype == "f16"
    assert config.eos_token_ids == ()
    assert config.num_kv_heads == 4
    assert read(tmp_path, eos_token_id=-1).eos_token_ids == ()


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff\xfe", b"[" * 100_000])
def test_a_file_that_is_no_object_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_hf_config(tmp_path, lambda: "f16")
