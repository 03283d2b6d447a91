"""GGUF metadata as a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.checkpoint_files import GgufBuilder
from twinfire.artifacts.gguf_config import read_gguf_config
from twinfire.artifacts.gguf_file import GgufFile
from twinfire.artifacts.model_config import ModelConfig, RopeConfig
from twinfire.artifacts.rope_config import llama3_freq_factors
from twinfire.protocol.errors import ModelError

LLAMA3 = RopeConfig(
    theta=5e5, kind="llama3", factor=32.0, original_max_position=8192, high_freq_factor=4.0
)


def read(
    folder: Path,
    architecture: str = "llama",
    tensors: dict[str, np.ndarray] | None = None,
    **changed: Any,
) -> ModelConfig:
    builder = GgufBuilder(folder / "m.gguf", architecture).add_sizes(**changed)
    builder.writer.add_bos_token_id(1)
    builder.writer.add_eos_token_id(2)
    builder.writer.add_eot_token_id(7)
    builder.writer.add_tensor("token_embd.weight", np.zeros((320, 64), np.float16))
    for name, array in (tensors or {}).items():
        builder.writer.add_tensor(name, array)
    return read_gguf_config(GgufFile(builder.save()))


def test_sizes_and_token_ids(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert config == ModelConfig(
        architecture="llama",
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        max_position=512,
        tie_word_embeddings=True,
        dtype="f16",
        bos_token_id=1,
        eos_token_ids=(2, 7),
    )


def test_what_only_the_tensors_tell(tmp_path: Path) -> None:
    bias = np.zeros(64, np.float32)
    tensors = {"output.weight": np.zeros((320, 64), np.float32), "blk.0.attn_q.bias": bias}
    config = read(tmp_path, "qwen2", tensors)
    assert config.qkv_bias
    assert not config.output_bias
    assert not config.tie_word_embeddings
    assert config.dtype == "f32"
    assert read(tmp_path, "qwen3", **{"attention.key_length": 32}).head_dim == 32
    assert read(tmp_path, "qwen3").qk_norm


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recovered_from_its_tensor(tmp_path: Path, factor: float) -> None:
    expected = RopeConfig(
        theta=5e5, kind="llama3", factor=factor, original_max_position=8192, high_freq_factor=4.0
    )
    factors = llama3_freq_factors(expected, 64).astype(np.float32)
    sizes = {"attention.head_count": 1, "attention.head_count_kv": 1, "rope.freq_base": 5e5}
    config = read(tmp_path, tensors={"rope_freqs.weight": factors}, **sizes)
    assert config.rope == expected


def test_unit_factors_are_no_scaling(tmp_path: Path) -> None:
    ones = {"rope_freqs.weight": np.ones(8, np.float32)}
    assert read(tmp_path, tensors=ones).rope == RopeConfig(theta=10000.0)


def test_linear_and_yarn(tmp_path: Path) -> None:
    linear = read(tmp_path, **{"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    assert linear.rope == RopeConfig(theta=10000.0, kind="linear", factor=4.0)
    yarn = read(
        tmp_path,
        **{
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 512,
        },
    )
    assert yarn.rope.kind == "yarn"
    assert yarn.rope.attention_factor == pytest.approx(0.1 * np.log(4.0) + 1)
    assert yarn.max_position == 2048


@pytest.mark.parametrize(
    ("architecture", "changed", "message"),
    [
        ("gemma", {}, "'gemma' is not supported; supported in GGUF files: llama, qwen2, qwen3"),
        ("llama", {"block_count": None}, r"'llama\.block_count' is missing"),
        ("llama", {"attention.layer_norm_rms_epsilon": None}, "rms_epsilon' is missing"),
        ("llama", {"attention.head_count_kv": 3}, "head_count_kv' is 3, which does not divide"),
        ("llama", {"attention.head_count": [4, 2]}, "head_count' differs between layers"),
        ("llama", {"expert_count": 8}, "expert_count' is above 0"),
        ("llama", {"rope.dimension_count": 8}, "dimension_count' is 8, must be the head's 16"),
        ("llama", {"rope.scaling.type": "longrope"}, "'longrope'; supported are"),
        ("llama", {"attention.value_length": 32}, "value_length' is 32"),
    ],
)
def test_a_bad_key_is_named(
    tmp_path: Path, architecture: str, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        read(tmp_path, architecture, **changed)
    assert "m.gguf" in str(caught.value)


def test_a_size_per_layer_is_read_when_all_are_equal(tmp_path: Path) -> None:
    assert read(tmp_path, **{"attention.head_count": [4, 4]}).num_heads == 4


def test_unknown_frequency_factors_are_refused(tmp_path: Path) -> None:
    factors = {"rope_freqs.weight": np.linspace(1, 8, 8, dtype=np.float32)}
    with pytest.raises(ModelError, match=r"rope_freqs\.weight"):
        read(tmp_path, tensors=factors)


def test_parts_of_a_split_file_are_refused(tmp_path: Path) -> None:
    builder = GgufBuilder(tmp_path / "m-00001-of-00002.gguf").add_sizes()
    builder.writer.add_uint16("split.count", 2)
    builder.writer.add_tensor("token_embd.weight", np.zeros((320, 64), np.float16))
    with pytest.raises(ModelError, match=r"split\.count"):
        read_gguf_config(GgufFile(builder.save()))
