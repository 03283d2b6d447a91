"""Draft heads with latent attention on torch, against keys and values that are made for each head.

Sources: DeepSeek-V2 (arXiv:2405.04434, section 2.1) and DeepSeek-V3's published inference code for
the layer, vLLM's and SGLang's loaders of `Eagle3DeepseekV2ForCausalLM` and TorchSpec's trainer for
what an EAGLE-3 head changes of it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3RotaryEmbedding,
)

from support.draft_feeder import DraftFeeder, assert_same_drafts, native_drafter, torch_drafter
from support.latent_heads import LATENT_VARIANTS, ExpandedHead, inverse_frequencies, latent_head
from support.step_batches import Fed, make_batch
from support.tiny_models import ArrayWeights, TinyModel, tiny_model, tokens_of
from twinfire.artifacts.draft_head import DraftHead
from twinfire.artifacts.draft_head_config import DraftHeadConfig, MlaSizes
from twinfire.artifacts.model_config import RopeConfig
from twinfire.artifacts.rope_config import yarn_mscale
from twinfire.cache.kv_group import KvGroup
from twinfire.engine.draft_runner import DraftedTokens
from twinfire.engine.torch_draft import draft_kv_group
from twinfire.kernels.torch.exact import ExactNumerics
from twinfire.kernels.torch.fast import FastNumerics
from twinfire.kernels.torch.kv_memory import KvMemory
from twinfire.kernels.torch.numerics import Numerics
from twinfire.kernels.torch.step import TorchStep
from twinfire.kernels.torch.weights import TorchWeights
from twinfire.models.latent_attention import LatentAttention
from twinfire.models.rope import rope_table
from twinfire.protocol.errors import ModelError

CPU = torch.device("cpu")
LENGTH, NUM_DRAFTS = 45, 4


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return tiny_model("llama")


def expected_scores(
    model: TinyModel, head: DraftHead, drafter: DraftFeeder, tokens: list[int], drafted: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the formula's scores after every token, and along a chain of drafts."""
    features = [feature.numpy().astype(np.float64) for feature in drafter.draft.target_features]
    table = model.weights.tensor("model.embed_tokens.weight").to_float32()
    expanded = ExpandedHead(head, table)
    first = [
        expanded.first([feature[row] for feature in features], tokens[row + 1])
        for row in range(LENGTH)
    ]
    return np.stack(first), np.stack([expanded.further(token) for token in drafted[:-1]])


def choices(scores: np.ndarray, head: DraftHead) -> tuple[np.ndarray, np.ndarray]:
    columns = scores.argmax(axis=1)
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    return (columns if head.draft_ids is None else head.draft_ids[columns]), 1 / shares.sum(axis=1)


@pytest.mark.parametrize("name", LATENT_VARIANTS)
def test_every_row_and_chain_is_what_made_keys_and_values_give(model: TinyModel, name: str) -> None:
    head, tokens = latent_head(name), tokens_of(1, LENGTH + 1)
    drafter = torch_drafter(model, head)
    (every_row,) = drafter.first([(Fed(tokens), LENGTH)])
    (chain,) = drafter.chains([(Fed(tokens), LENGTH)], NUM_DRAFTS)
    first, further = expected_scores(model, head, drafter, tokens, chain.token_ids.tolist())
    ids, shares = choices(first, head)
    np.testing.assert_array_equal(every_row.token_ids, ids)
    np.testing.assert_allclose(every_row.probabilities, shares, rtol=1e-4)
    ids, shares = choices(further, head)
    np.testing.assert_array_equal(chain.token_ids, [every_row.token_ids[-1], *ids])
    np.testing.assert_allclose(chain.probabilities[1:], shares, rtol=1e-4)


@pytest.mark.parametrize("name", ["kimi_3_1", "two_layers", "last_hidden"])
@pytest.mark.parametrize("sizes", [[1] * 45, [16, 29], [32, 13], [33, 1, 11], [2, 40, 3]])
def test_any_chunking_gives_the_same_bits(model: TinyModel, name: str, sizes: list[int]) -> None:
    head, tokens = latent_head(name), tokens_of(2, LENGTH + 1)
    whole = torch_drafter(model, head)
    (expected,) = whole.first([(Fed(tokens), LENGTH)])
    chunked, fed = torch_drafter(model, head), Fed(tokens)
    parts = [chunked.first([(fed, size)])[0] for size in sizes]
    joined = DraftedTokens(
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.probabilities for part in parts]),
    )
    assert_same_drafts(joined, expected)


@pytest.mark.parametrize("name", ["kimi", "kimi_3_1", "two_layers", "last_hidden"])
@pytest.mark.parametrize("counts", [[1] * 12, [5, 1, 6], [30, 4, 1, 10]])
def test_a_chain_step_by_step_is_the_one_of_the_whole_text(
    model: TinyModel, name: str, counts: list[int]
) -> None:
    """Drafts that were written past the end are overwritten by true rows, however many."""
    head, tokens = latent_head(name), tokens_of(3, sum(counts) + 1)
    stepwise, fed = torch_drafter(model, head), Fed(tokens)
    for count in counts:
        (chain,) = stepwise.chains([(fed, count)], 5)
    (whole,) = torch_drafter(model, head).chains([(Fed(tokens), sum(counts))], 5)
    assert_same_drafts(chain, whole)


def test_sequences_beside_each_other_keep_their_bits(model: TinyModel) -> None:
    head = latent_head("kimi")
    sequences = [tokens_of(10 + length, length + 1) for length in (1, 5, 33, 70)]
    alone = torch_drafter(model, head)
    expected = [alone.chains([(Fed(tokens), len(tokens) - 1)], 3)[0] for tokens in sequences]
    together = torch_drafter(model, head)
    pieces = [(Fed(tokens), len(tokens) - 1) for tokens in sequences]
    for mine, theirs in zip(together.chains(pieces, 3), expected, strict=True):
        assert_same_drafts(mine, theirs)


@pytest.mark.parametrize("name", ["kimi", "two_layers"])
def test_bf16_is_near(model: TinyModel, name: str) -> None:
    head, tokens = latent_head(name), tokens_of(4, LENGTH + 1)
    (expected,) = torch_drafter(model, head).first([(Fed(tokens), LENGTH)])
    drafter = torch_drafter(model, head, "bf16")
    (drafted,) = drafter.first([(Fed(tokens), LENGTH)])
    equal = drafted.token_ids == expected.token_ids
    assert equal.mean() > 0.8
    assert np.median(np.abs(drafted.probabilities - expected.probabilities)[equal]) < 0.05
    assert drafter.runner.kv_layout.groups[1].dtype == "bf16"


@pytest.mark.parametrize("name", LATENT_VARIANTS)
def test_the_cache_holds_one_latent_row_a_token(model: TinyModel, name: str) -> None:
    config = LATENT_VARIANTS[name]
    assert config.mla is not None
    layout = torch_drafter(model, latent_head(name)).runner.kv_layout
    target, draft = layout.groups
    width = config.mla.kv_lora_rank + config.mla.qk_rope_head_dim
    assert draft.bytes_per_block() == config.num_layers * 32 * width * 4
    assert layout.bytes_per_block == target.bytes_per_block() + draft.bytes_per_block()


def test_kimi_s_rows_have_1152_bytes() -> None:
    sizes = MlaSizes(1536, 512, 128, 64, 128)
    config = replace(LATENT_VARIANTS["latent"], num_heads=64, head_dim=192, mla=sizes)
    group = draft_kv_group(replace(latent_head("latent"), config=config), "bf16")
    assert group.bytes_per_block() == 32 * 1152
    assert group.text != replace(group, values_in_keys=False).text


KIMI_YARN = {
    "rope_type": "yarn",
    "rope_theta": 50_000.0,
    "factor": 64.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def rope_of(parameters: dict[str, object]) -> RopeConfig:
    factor, mscale = float(parameters["factor"]), float(parameters["mscale"])  # type: ignore[arg-type]
    all_dim = float(parameters["mscale_all_dim"])  # type: ignore[arg-type]
    return RopeConfig(
        theta=50_000.0,
        kind="yarn",
        factor=factor,
        original_max_position=int(parameters["original_max_position_embeddings"]),  # type: ignore[call-overload]
        beta_fast=float(parameters["beta_fast"]),  # type: ignore[arg-type]
        attention_factor=yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim),
    )


@pytest.mark.parametrize(
    "changes",
    [{}, {"beta_fast": 1.0}, {"mscale": 0.707}, {"factor": 32.0, "mscale_all_dim": 0.5}],
)
def test_yarn_s_numbers_are_transformers_and_the_paper_s(changes: dict[str, float]) -> None:
    parameters = KIMI_YARN | changes
    table = rope_table(rope_of(parameters), 64)
    config = deepseek_config(parameters, nope=128, turned=64)
    rotary = DeepseekV3RotaryEmbedding(config)
    np.testing.assert_allclose(table.inv_freq, rotary.inv_freq.numpy(), rtol=1e-6)
    assert table.attention_factor == pytest.approx(rotary.attention_scaling)
    np.testing.assert_allclose(
        table.inv_freq, inverse_frequencies(rope_of(parameters), 64), rtol=1e-6
    )


def deepseek_config(
    parameters: dict[str, object] | None, *, nope: int, turned: int
) -> DeepseekV3Config:
    """Attention over rows of twice the width, as in the first layer of a head."""
    return DeepseekV3Config(
        hidden_size=2 * 48,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=20,
        kv_lora_rank=16,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=turned,
        v_head_dim=10,
        max_position_embeddings=262_144,
        rope_parameters=parameters or {"rope_type": "default", "rope_theta": 10_000.0},
        attention_bias=False,
        attn_implementation="eager",
    )


def deepseek_attention(
    config: DraftHeadConfig, parameters: dict[str, object] | None
) -> tuple[DeepseekV3Attention, DeepseekV3RotaryEmbedding]:
    their_config = deepseek_config(parameters, nope=12, turned=8)
    attention = DeepseekV3Attention(their_config, 0)
    attention.o_proj = torch.nn.Linear(4 * 10, config.hidden_size, bias=False)
    for norm in (attention.q_a_layernorm, attention.kv_a_layernorm):
        norm.variance_epsilon = config.rms_norm_eps
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in attention.parameters():
            values = 0.3 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + values if parameter.ndim == 1 else values)
    return attention.eval(), DeepseekV3RotaryEmbedding(their_config)


@pytest.mark.parametrize("numerics", [ExactNumerics(), FastNumerics(CPU, torch.float32)])
@pytest.mark.parametrize("parameters", [None, KIMI_YARN, KIMI_YARN | {"mscale_all_dim": 0.6}])
@pytest.mark.parametrize("sizes", [[70], [1] * 70, [31, 1, 38]])
def test_the_layer_is_transformers_deepseek_v3(
    numerics: Numerics, parameters: dict[str, object] | None, sizes: list[int]
) -> None:
    """Transformers makes keys and values for each head."""
    config = LATENT_VARIANTS["latent"]
    assert config.mla is not None
    if parameters is not None:
        # So short a window that its end is passed.
        parameters = parameters | {"original_max_position_embeddings": 32}
        weight = yarn_mscale(64.0, float(parameters["mscale_all_dim"]))  # type: ignore[arg-type]
        sizes_of = replace(config.mla, score_factor=weight**2)
        config = replace(config, rope=rope_of(parameters), mla=sizes_of)
    attention, rotary = deepseek_attention(config, parameters)
    x = torch.randn(70, 96, generator=torch.Generator().manual_seed(6))
    with torch.inference_mode():
        turns = rotary(x[None], torch.arange(70)[None])
        hidden = torch.full((70, 70), float("-inf")).triu(1)[None, None]
        expected = attention(x[None], turns, hidden)[0][0]

    arrays = {f"a.{name}": value.numpy() for name, value in attention.state_dict().items()}
    weights = TorchWeights(
        numerics.pack, torch.float32, CPU, lambda _: None, numerics.pack_per_head
    )
    assert config.mla is not None
    rope = weights.rope(rope_table(config.rope, config.mla.qk_rope_head_dim))
    layer = LatentAttention(config, config.mla, ArrayWeights(arrays), weights, rope, "a")
    group = KvGroup("draft", 2, 1, config.mla.cached_width, "f32", values_in_keys=True)
    memory = KvMemory(group, 12, 32, CPU)
    fed, next_block, computed = Fed([0] * 70), [3], []
    for size in sizes:
        rows = x[fed.num_computed : fed.num_computed + size]
        batch = make_batch([(fed, size)], next_block)
        with torch.inference_mode():
            computed.append(layer(TorchStep(weights, numerics, memory, batch), rows, 1))
    torch.testing.assert_close(torch.cat(computed), expected, rtol=1e-4, atol=1e-4)


def test_latent_attention_is_refused_by_the_native_kernels(model: TinyModel) -> None:
    with pytest.raises(ModelError, match=r"attention is mla .*native kernels.*--backend torch"):
        native_drafter(model, latent_head("latent"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mla": None}, "attention is mla, its mla sizes are None"),
        ({"attention": "llama"}, "attention is llama, its mla sizes are MlaSizes"),
        ({"head_dim": 24}, r"q_b_proj.weight is .80, 20., not .96, 20."),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    model: TinyModel, changes: dict[str, object], message: str
) -> None:
    head = latent_head("latent")
    with pytest.raises(ModelError, match=message):
        torch_drafter(model, replace(head, config=replace(head.config, **changes)))
