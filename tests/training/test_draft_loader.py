"""Heads of every flag, from file to drafts, against the formula one token at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from support.draft_heads import (
    DRAFT_VOCAB,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    TARGET,
    VOCAB,
    head_shapes,
    layer_shapes,
    random_tensors,
    vocabulary_maps,
    write_head,
    yuhuili_config,
)
from twinfire.artifacts.draft_head import open_draft_head
from twinfire.models.rope import rope_table
from twinfire.protocol.errors import ModelError
from twinfire.training.draft_loader import draft_embedding, load_draft_module, target_token_ids
from twinfire.training.draft_module import PassKeys

NUM_PASSES, LENGTH, EPS = 3, 5, 1e-5
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "eagle-3.1": {"fc_norm": True, "norm_output": True},
    "two layers": {"num_hidden_layers": 2},
    "no features": {"eagle_config": {"use_aux_hidden_state": False}},
    "yarn": {"rope_theta": 10000.0, "rope_scaling": YARN},
    "wide target": {"target_hidden_size": 40},
}


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS) * weight


class Formula:
    """Section 1 of arXiv:2503.01840 with the flags of published heads, token after token."""

    def __init__(self, tensors: dict[str, Tensor], config: dict[str, Any], rope: Any) -> None:
        self.t = {name: tensor.double() for name, tensor in tensors.items()}
        self.config = config
        table = rope_table(rope, HEAD_DIM)
        self.inv_freq = torch.tensor(table.inv_freq).double()
        self.factor = table.attention_factor
        self.keys: list[list[Tensor]] = [[], []]
        self.values: list[list[Tensor]] = [[], []]

    def first(self, features: Tensor) -> Tensor:
        if "fc.weight" not in self.t:
            return features
        if self.config.get("fc_norm"):
            low, middle, high = features.chunk(3)
            features = torch.cat(
                [norm(x, self.t[f"fc_norm.{i}.weight"]) for i, x in enumerate((low, middle, high))]
            )
        if self.config.get("norm_before_fc"):
            features = norm(features, self.t["input_norm.weight"])
        return self.t["fc.weight"] @ features

    def row(self, embedding: Tensor, feature: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """Return logits and what is fed back; keys and values stay."""
        normed = norm(feature, self.t["midlayer.hidden_norm.weight"])
        x = torch.cat([norm(embedding, self.t["midlayer.input_layernorm.weight"]), normed])
        residual = normed if self.config.get("norm_before_residual") else feature
        y = self.layer(0, "midlayer", x, residual, position)
        if self.config.get("num_hidden_layers", 1) == 2:
            x = norm(y, self.t["layers.1.input_layernorm.weight"])
            y = self.layer(1, "layers.1", x, y, position)
        last = norm(y, self.t["norm.weight"])
        return self.t["lm_head.weight"] @ last, last if self.config.get("norm_output") else y

    def layer(self, index: int, name: str, x: Tensor, residual: Tensor, position: int) -> Tensor:
        def weight(part: str) -> Tensor:
            return self.t[f"{name}.{part}.weight"]

        query = self.turned(weight("self_attn.q_proj") @ x, HEADS, position)
        self.keys[index].append(self.turned(weight("self_attn.k_proj") @ x, KV_HEADS, position))
        self.values[index].append((weight("self_attn.v_proj") @ x).view(KV_HEADS, HEAD_DIM))
        heads = []
        for head in range(HEADS):
            kv = head // (HEADS // KV_HEADS)
            scores = torch.stack([key[kv] @ query[head] for key in self.keys[index]])
            shares = (scores / HEAD_DIM**0.5).softmax(0)
            heads.append(shares @ torch.stack([value[kv] for value in self.values[index]]))
        y = residual + weight("self_attn.o_proj") @ torch.cat(heads)
        z = norm(y, weight("post_attention_layernorm"))
        gated = silu(weight("mlp.gate_proj") @ z) * (weight("mlp.up_proj") @ z)
        return y + weight("mlp.down_proj") @ gated

    def turned(self, vector: Tensor, count: int, position: int) -> Tensor:
        first, second = vector.view(count, HEAD_DIM).chunk(2, dim=-1)
        cos = (position * self.inv_freq).cos() * self.factor
        sin = (position * self.inv_freq).sin() * self.factor
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def variant_tensors(changed: dict[str, Any]) -> dict[str, Tensor]:
    width = changed.get("target_hidden_size", HIDDEN)
    shapes = head_shapes("midlayer") | {"fc.weight": (HIDDEN, 3 * width)}
    if changed.get("num_hidden_layers") == 2:
        shapes |= layer_shapes("layers.1", HIDDEN)
    if changed.get("norm_before_fc"):
        shapes["input_norm.weight"] = (3 * width,)
    if changed.get("fc_norm"):
        shapes |= {f"fc_norm.{index}.weight": (width,) for index in range(3)}
    if "eagle_config" in changed:
        del shapes["fc.weight"]
    if width != HIDDEN:
        shapes["embed_tokens.weight"] = (VOCAB, HIDDEN)
    # The usual spread of weights, so that float32 is near the formula's float64.
    return {name: tensor * 0.2 for name, tensor in random_tensors(shapes, seed=3).items()}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_head_drafts_by_the_formula(tmp_path: Path, name: str) -> None:
    changed = VARIANTS[name]
    tensors = variant_tensors(changed)
    folder = write_head(tmp_path, yuhuili_config(**changed), {**tensors, **vocabulary_maps()})
    width = changed.get("target_hidden_size", HIDDEN)
    head = open_draft_head(folder, replace(TARGET, hidden_size=width))
    module = load_draft_module(head)
    torch.manual_seed(1)
    num_features = 3 if head.config.uses_features else 1
    features = torch.randn(LENGTH, num_features * width)
    embeddings = torch.randn(LENGTH + NUM_PASSES, HIDDEN)
    passes: list[Tensor] = []
    seen: list[PassKeys] = []
    feature = module.first_feature(features)
    for index in range(NUM_PASSES):
        feature, own = module(embeddings[1 + index : 1 + index + LENGTH], feature, seen)
        seen.append(own)
        passes.append(module.logits(feature))
        feature = module.next_feature(feature)
    for row in (0, LENGTH - 1):
        formula = Formula(tensors, changed, head.config.rope)
        fed = torch.zeros(0)
        expected: list[Tensor] = []
        for position in range(row + NUM_PASSES):
            read = formula.first(features[position].double()) if position <= row else fed
            logits, fed = formula.row(embeddings[position + 1].double(), read, position)
            if position >= row:
                expected.append(logits)
        got = torch.stack([logits[row] for logits in passes]).double()
        torch.testing.assert_close(got, torch.stack(expected), rtol=1e-4, atol=1e-4)


def test_flags_change_what_is_drafted(tmp_path: Path) -> None:
    """No flag is read and then forgotten: with the same tensors each gives other drafts."""
    results: dict[str, Tensor] = {}
    for name in ("plain", "norm_before_residual", "norm_output"):
        tensors = {**variant_tensors(VARIANTS[name]), **vocabulary_maps()}
        folder = write_head(tmp_path / name, yuhuili_config(**VARIANTS[name]), tensors)
        module = load_draft_module(open_draft_head(folder, TARGET))
        torch.manual_seed(1)
        feature, _ = module(torch.randn(4, HIDDEN), torch.randn(4, HIDDEN), [])
        results[name] = module.next_feature(feature)
    assert not torch.allclose(results["plain"], results["norm_before_residual"])
    assert not torch.allclose(results["plain"], results["norm_output"])


def test_the_embedding_is_the_heads_own_or_the_targets(tmp_path: Path) -> None:
    from support.tiny_models import ArrayWeights

    table = torch.randn(VOCAB, HIDDEN)
    target = ArrayWeights({"model.embed_tokens.weight": table.numpy()})
    tensors = {**variant_tensors({}), **vocabulary_maps()}
    shared = open_draft_head(write_head(tmp_path / "a", yuhuili_config(), tensors), TARGET)
    assert torch.equal(draft_embedding(shared, target), table.bfloat16())
    tensors["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN).bfloat16()
    own = open_draft_head(write_head(tmp_path / "b", yuhuili_config(), tensors), TARGET)
    assert torch.equal(draft_embedding(own, target), tensors["embed_tokens.weight"])
    assert target_token_ids(own).tolist() == list(range(0, 3 * DRAFT_VOCAB, 3))


def test_latent_attention_is_refused(tmp_path: Path) -> None:
    head = open_draft_head(
        write_head(tmp_path, yuhuili_config(), {**variant_tensors({}), **vocabulary_maps()}), TARGET
    )
    latent = replace(head, config=replace(head.config, attention="mla"))
    with pytest.raises(ModelError, match="attention is mla; only llama heads are computed"):
        load_draft_module(latent)
