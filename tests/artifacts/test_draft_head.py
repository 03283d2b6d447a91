"""Every published layout of a draft head, made small, opened as one; and what does not fit."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.draft_heads import (
    DRAFT_VOCAB,
    HEADS,
    HIDDEN,
    INNER,
    LLAMA_SIZES,
    TARGET,
    VOCAB,
    head_shapes,
    layer_shapes,
    random_tensors,
    vocabulary_maps,
    write_head,
    yuhuili_config,
    yuhuili_tensors,
)
from twinfire.artifacts.draft_head import DraftHead, open_draft_head
from twinfire.artifacts.draft_head_config import MlaSizes
from twinfire.artifacts.model_config import RopeConfig
from twinfire.protocol.errors import InvalidRequest, ModelError

CANONICAL = tuple(head_shapes("layers.0"))


def assert_same(head: DraftHead, tensors: dict[str, torch.Tensor], names: dict[str, str]) -> None:
    """`names` takes this project's names to the file's."""
    assert set(head.weights) == set(names)
    for name, file_name in names.items():
        found = head.weights.tensor(name)
        assert found.name == name
        np.testing.assert_array_equal(found.to_float32(), tensors[file_name].float().numpy())


@pytest.mark.parametrize("as_bin", [True, False], ids=["pytorch_model.bin", "safetensors"])
def test_yuhuili_eagle3_llama(tmp_path: Path, as_bin: bool) -> None:
    """yuhuili/EAGLE3-LLaMA3.1-Instruct-8B: `midlayer.*`, d2t, t2d, no rope_theta, no layer ids."""
    tensors = yuhuili_tensors()
    folder = write_head(tmp_path, yuhuili_config(), tensors, as_bin=as_bin)
    head = open_draft_head(folder, TARGET)
    names = {name: name.replace("layers.0", "midlayer") for name in CANONICAL}
    assert_same(head, tensors, names)
    config = head.config
    assert config.feature_layers == (2, 8, 13)
    # transformers' default, which the head was trained with, and not the target's own.
    assert config.rope == RopeConfig(theta=10_000.0)
    assert (config.draft_vocab_size, config.vocab_size) == (DRAFT_VOCAB, VOCAB)
    assert not config.norm_before_residual
    assert config.uses_features
    assert head.draft_ids is not None
    assert head.draft_ids.tolist() == list(range(0, 3 * DRAFT_VOCAB, 3))


def test_one_content_has_one_key_in_every_layout(tmp_path: Path) -> None:
    tensors = yuhuili_tensors()
    as_bin = open_draft_head(
        write_head(tmp_path / "a", yuhuili_config(), tensors, as_bin=True), TARGET
    )
    folder = write_head(tmp_path / "b", yuhuili_config(), tensors)
    os.utime(folder / "model.safetensors", (1, 1))
    assert open_draft_head(folder, TARGET).content_key == as_bin.content_key
    changed = {**tensors, "norm.weight": tensors["norm.weight"] + 1}
    other = open_draft_head(write_head(tmp_path / "c", yuhuili_config(), changed), TARGET)
    assert other.content_key != as_bin.content_key
    layers = open_draft_head(folder, TARGET, aux_layer_ids=(1, 7, 12))
    assert layers.content_key != as_bin.content_key
    shifted = {**tensors, "d2t": tensors["d2t"] + 1}
    other = open_draft_head(write_head(tmp_path / "d", yuhuili_config(), shifted), TARGET)
    assert other.content_key != as_bin.content_key


def test_modelopt_full_vocabulary(tmp_path: Path) -> None:
    """nvidia/*-Eagle3 by ModelOpt: `layers.0.*`, no d2t, nested eagle_config, its own flags."""
    tensors = random_tensors(head_shapes("layers.0", draft_vocab=VOCAB))
    config = {
        **LLAMA_SIZES,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": VOCAB,
        "rope_theta": 500000.0,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [1, 7, 12],
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
            "parallel_draft_step": 1,
        },
    }
    head = open_draft_head(write_head(tmp_path, config, tensors), TARGET)
    assert_same(head, tensors, {name: name for name in CANONICAL})
    assert head.draft_ids is None
    assert head.config.feature_layers == (2, 8, 13)
    assert head.config.rope.theta == 500000.0


def test_speculators(tmp_path: Path) -> None:
    """RedHatAI/*-speculator.eagle3: `transformer_layer_config`, residual after the norm, its own
    embedding; `model.layers.0.*` as some SpecForge exports name them."""
    shapes = head_shapes("model.layers.0", "model.")
    shapes["model.embed_tokens.weight"] = (VOCAB, HIDDEN)
    tensors = {**random_tensors(shapes), **vocabulary_maps()}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": DRAFT_VOCAB,
        "target_hidden_size": None,
        "transformer_layer_config": {**LLAMA_SIZES, "model_type": "llama", "head_dim": 8},
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "meta-llama/Llama-3.1-8B-Instruct"},
        },
        "speculators_version": "0.1.0",
    }
    head = open_draft_head(write_head(tmp_path / "a", config, tensors), TARGET)
    names = {name: name if name == "lm_head.weight" else f"model.{name}" for name in CANONICAL}
    assert_same(head, tensors, {**names, "embed_tokens.weight": "model.embed_tokens.weight"})
    assert head.config.norm_before_residual
    plain = {**config, "norm_before_residual": False}
    head = open_draft_head(write_head(tmp_path / "b", plain, tensors), TARGET)
    assert not head.config.norm_before_residual


def test_legacy_eagle31_norms(tmp_path: Path) -> None:
    """lightseekorg/kimi-k2.6-eagle3.1-mla's flags under the older names: aux_norm_low|mid|high."""
    old = {f"aux_norm_{place}.weight": (HIDDEN,) for place in ("low", "mid", "high")}
    tensors = {**random_tensors(head_shapes("midlayer") | old), **vocabulary_maps()}
    config = yuhuili_config(use_aux_norm=True, norm_output=True)
    head = open_draft_head(write_head(tmp_path, config, tensors), TARGET)
    assert head.config.fc_norm
    assert head.config.norm_output
    for index, place in enumerate(("low", "mid", "high")):
        found = head.weights.tensor(f"fc_norm.{index}.weight").to_float32()
        np.testing.assert_array_equal(found, tensors[f"aux_norm_{place}.weight"].float().numpy())


@pytest.mark.parametrize("nested", [True, False])
def test_gpt_oss_norm_before_fc(tmp_path: Path, nested: bool) -> None:
    """nvidia/gpt-oss-120b-Eagle3: `norm_before_fc` at the top or in eagle_config, `input_norm`."""
    shapes = head_shapes("midlayer") | {"input_norm.weight": (3 * HIDDEN,)}
    flag = {"norm_before_fc": True}
    config = yuhuili_config(**({"eagle_config": flag} if nested else flag))
    tensors = {**random_tensors(shapes), **vocabulary_maps()}
    head = open_draft_head(write_head(tmp_path, config, tensors), TARGET)
    assert head.config.norm_before_fc
    assert "input_norm.weight" in head.weights


def test_two_layers(tmp_path: Path) -> None:
    """nvidia/gpt-oss-120b-Eagle3-long-context: num_hidden_layers 2, the second one's width is h."""
    shapes = head_shapes("layers.0") | layer_shapes("layers.1", HIDDEN)
    shapes["layers.1.hidden_norm.weight"] = (HIDDEN,)
    tensors = {**random_tensors(shapes), **vocabulary_maps()}
    config = yuhuili_config(num_hidden_layers=2)
    head = open_draft_head(write_head(tmp_path, config, tensors), TARGET)
    assert head.config.num_layers == 2
    assert "layers.1.self_attn.q_proj.weight" in head.weights
    assert "layers.1.hidden_norm.weight" not in head.weights


def test_features_not_used(tmp_path: Path) -> None:
    """eagle_config.use_aux_hidden_state=false, as ModelOpt can export: no fc."""
    shapes = head_shapes("layers.0")
    del shapes["fc.weight"]
    tensors = {**random_tensors(shapes), **vocabulary_maps()}
    config = yuhuili_config(eagle_config={"use_aux_hidden_state": False})
    head = open_draft_head(write_head(tmp_path, config, tensors), TARGET)
    assert not head.config.uses_features
    assert head.config.feature_layers == ()


def mla_head() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
        "layers.0.hidden_norm.weight": (HIDDEN,),
        "layers.0.input_layernorm.weight": (HIDDEN,),
        "layers.0.post_attention_layernorm.weight": (HIDDEN,),
        "layers.0.mlp.gate_proj.weight": (INNER, HIDDEN),
        "layers.0.mlp.up_proj.weight": (INNER, HIDDEN),
        "layers.0.mlp.down_proj.weight": (HIDDEN, INNER),
        "layers.0.self_attn.q_a_proj.weight": (12, 2 * HIDDEN),
        "layers.0.self_attn.q_a_layernorm.weight": (12,),
        "layers.0.self_attn.q_b_proj.weight": (HEADS * (8 + 4), 12),
        "layers.0.self_attn.kv_a_proj_with_mqa.weight": (16 + 4, 2 * HIDDEN),
        "layers.0.self_attn.kv_a_layernorm.weight": (16,),
        "layers.0.self_attn.kv_b_proj.weight": (HEADS * (8 + 6), 16),
        "layers.0.self_attn.o_proj.weight": (HIDDEN, HEADS * 6),
    }
    config = {
        **LLAMA_SIZES,
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "model_type": "kimi_k2",
        "num_key_value_heads": HEADS,
        "q_lora_rank": 12,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "rope_theta": 50000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 64.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 1.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 7, 12]},
    }
    return config, random_tensors(shapes)


def test_kimi_mla(tmp_path: Path) -> None:
    """nvidia/Kimi-K2.5-Thinking-Eagle3: 16 tensors, MLA, yarn with its own beta_fast 1."""
    config, tensors = mla_head()
    head = open_draft_head(write_head(tmp_path, config, tensors), TARGET)
    assert len(set(head.weights)) == 16
    assert head.config.attention == "mla"
    factor = (0.1 * np.log(64.0) + 1.0) ** 2
    sizes = head.config.mla
    assert sizes == MlaSizes(12, 16, 8, 4, 6, score_factor=sizes.score_factor if sizes else 0.0)
    assert sizes.score_factor == pytest.approx(factor)
    assert head.config.head_dim == 12
    rope = head.config.rope
    assert (rope.kind, rope.factor, rope.beta_fast, rope.attention_factor) == ("yarn", 64, 1, 1)
    assert rope.original_max_position == 4096


def test_kimi_llama_head(tmp_path: Path) -> None:
    """AQ-MedAI/Kimi-K25-eagle3: Llama attention over an MLA target, whose fields it also has."""
    config = yuhuili_config(kv_lora_rank=16, rope_theta=1e6, rms_norm_eps=1e-6, head_dim=8)
    head = open_draft_head(write_head(tmp_path, config, yuhuili_tensors()), TARGET)
    assert head.config.attention == "llama"
    assert head.config.mla is None


def test_a_narrower_head_brings_its_embedding(tmp_path: Path) -> None:
    """Heads with target_hidden_size apart from hidden_size: fc takes the target's width."""
    shapes = head_shapes("midlayer") | {"fc.weight": (HIDDEN, 3 * 80)}
    tensors = {**random_tensors(shapes), **vocabulary_maps()}
    target = replace(TARGET, hidden_size=80)
    config = yuhuili_config(target_hidden_size=80)
    folder = write_head(tmp_path / "without", config, tensors)
    with pytest.raises(ModelError, match=r"embed_tokens.*missing.*width 80.*hidden_size is 32"):
        open_draft_head(folder, target)
    tensors.update(random_tensors({"embed_tokens.weight": (VOCAB, HIDDEN)}))
    head = open_draft_head(write_head(tmp_path / "with", config, tensors), target)
    assert head.config.target_hidden_size == 80
    assert "embed_tokens.weight" in head.weights


def test_an_embedding_of_another_shape_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = yuhuili_tensors() | random_tensors({"embed_tokens.weight": (VOCAB + 8, HIDDEN)})
    head = open_draft_head(write_head(tmp_path, yuhuili_config(), tensors), TARGET)
    assert "embed_tokens.weight" not in head.weights
    assert "the target's embedding is used" in caplog.text


def test_the_convention_is_logged_and_can_be_overruled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = yuhuili_config(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 7, 12]})
    folder = write_head(tmp_path, config, yuhuili_tensors())
    with caplog.at_level(logging.INFO):
        open_draft_head(folder, TARGET)
    assert "after 2, 8, 13 layers (numbers taken as layer_outputs" in caplog.text
    head = open_draft_head(folder, TARGET, aux_layer_ids=(1, 7, 12))
    assert head.config.feature_layers == (1, 7, 12)
    with pytest.raises(InvalidRequest, match=r"ascending from 0 to 16, got \[1, 7, 17\]"):
        open_draft_head(folder, TARGET, aux_layer_ids=(1, 7, 17))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"target_hidden_size": 64}, r"'target_hidden_size' is 64; the target's is 32"),
        ({"vocab_size": 128}, r"'vocab_size' is 128; the target's is 120"),
        ({"draft_vocab_size": 41}, r"'lm_head.weight' has shape \[40, 32\], wanted \[41, 32\]"),
        ({"num_attention_heads": 8}, r"k_proj.weight' has shape \[16, 64\], wanted \[8, 64\]"),
        ({"num_hidden_layers": 2}, r"'layers.1.input_layernorm.weight' is missing"),
        ({"norm_before_fc": True}, r"'input_norm.weight' is missing; wanted \[96\]"),
        ({"fc_norm": True}, r"'fc_norm.0.weight' is missing; wanted \[32\]"),
        ({"attention_bias": True}, r"'attention_bias' is True, which is not supported"),
        ({"hidden_act": "gelu"}, r"only silu"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, r"only EAGLE-3 heads"),
        ({"eagle_config": {"use_last_layernorm": False}}, r"'use_last_layernorm' is False"),
        ({"eagle_config": {"parallel_draft_step": 4}}, r"'parallel_draft_step' is above 1"),
        ({"eagle_config": 3}, r"'eagle_config' must be an object"),
        ({"num_aux_hidden_states": 2}, r"'num_aux_hidden_states' is 2, but 3 are named"),
        ({"layer_types": ["sliding_attention"]}, r"sliding_attention"),
        (
            {"eagle_aux_hidden_state_layer_ids": [2, 8, 40]},
            r"states after \[2, 8, 40\] layers.*target's 16",
        ),
        ({"eagle_aux_hidden_state_layer_ids": [2, 8, 13, 15]}, r"'fc.weight' has shape"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    folder = write_head(tmp_path, yuhuili_config(**changed), yuhuili_tensors())
    with pytest.raises(ModelError, match=message):
        open_draft_head(folder, TARGET)


def test_tensors_that_do_not_belong_are_named(tmp_path: Path) -> None:
    tensors = yuhuili_tensors()
    extra = tensors | random_tensors({"midlayer.self_attn.q_norm.weight": (8,)})
    folder = write_head(tmp_path / "extra", yuhuili_config(), extra)
    with pytest.raises(ModelError, match=r"'layers.0.self_attn.q_norm.weight' has no place"):
        open_draft_head(folder, TARGET)
    twice = tensors | random_tensors({"layers.0.hidden_norm.weight": (HIDDEN,)})
    folder = write_head(tmp_path / "twice", yuhuili_config(), twice)
    with pytest.raises(ModelError, match="are one tensor"):
        open_draft_head(folder, TARGET)
    outside = tensors | {"d2t": tensors["d2t"] + 50}
    folder = write_head(tmp_path / "outside", yuhuili_config(), outside)
    with pytest.raises(ModelError, match=r"takes draft id 24 to token 122, outside"):
        open_draft_head(folder, TARGET)
    del tensors["d2t"]
    folder = write_head(tmp_path / "without", yuhuili_config(), tensors)
    with pytest.raises(ModelError, match=r"40 of 120, but the head has no tensor 'd2t'"):
        open_draft_head(folder, TARGET)
    with pytest.raises(ModelError, match=r"is no draft head: .*config\.json is missing"):
        open_draft_head(tmp_path / "absent", TARGET)


def test_an_identity_map_is_no_map(tmp_path: Path) -> None:
    """Some exporters write d2t of zeros beside a full vocabulary."""
    tensors = random_tensors(head_shapes("midlayer", draft_vocab=VOCAB))
    tensors["d2t"] = torch.zeros(VOCAB, dtype=torch.int64)
    config = yuhuili_config(draft_vocab_size=None)
    head = open_draft_head(write_head(tmp_path, config, tensors), TARGET)
    assert head.draft_ids is None
    assert head.config.draft_vocab_size == VOCAB
