"""Draft heads of every variant on both backends, against the formula and the trained module."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from support.draft_feeder import DraftFeeder, native_drafter, torch_drafter
from support.native_runners import rounded_weights
from support.random_heads import VARIANTS, PlainHead, random_head
from support.step_batches import Fed
from support.tiny_models import ArrayWeights, TinyModel, tiny_model, tokens_of
from twinfire.artifacts.draft_head import DraftHead
from twinfire.artifacts.model_config import RopeConfig
from twinfire.protocol.errors import ModelError
from twinfire.training.draft_loader import load_draft_module
from twinfire.training.draft_module import PassKeys

LENGTH, NUM_DRAFTS = 45, 4


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return tiny_model("llama")


def embedding_of(model: TinyModel, head: DraftHead) -> np.ndarray:
    weights, name = head.weights, "embed_tokens.weight"
    if name not in weights:
        weights, name = model.weights, "model.embed_tokens.weight"
    return weights.tensor(name).to_float32()


def plain_scores(
    model: TinyModel, head: DraftHead, drafter: DraftFeeder, tokens: list[int], drafted: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the formula's scores after every token, and along a chain of drafts."""
    features = [feature.numpy().astype(np.float64) for feature in drafter.draft.target_features]
    plain = PlainHead(head, embedding_of(model, head))
    first = [
        plain.first([feature[row] for feature in features], tokens[row + 1])
        for row in range(LENGTH)
    ]
    return np.stack(first), np.stack([plain.further(token) for token in drafted[:-1]])


def choices(scores: np.ndarray, head: DraftHead) -> tuple[np.ndarray, np.ndarray]:
    columns = scores.argmax(axis=1)
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares = 1 / shares.sum(axis=1)
    return (columns if head.draft_ids is None else head.draft_ids[columns]), shares


@pytest.mark.parametrize("name", VARIANTS)
def test_torch_computes_the_formula(model: TinyModel, name: str) -> None:
    head, tokens = random_head(name), tokens_of(1, LENGTH + 1)
    drafter = torch_drafter(model, head)
    (every_row,) = drafter.first([(Fed(tokens), LENGTH)])
    (chain,) = drafter.chains([(Fed(tokens), LENGTH)], NUM_DRAFTS)
    drafted = chain.token_ids.tolist()
    first, further = plain_scores(model, head, drafter, tokens, drafted)
    ids, shares = choices(first, head)
    np.testing.assert_array_equal(every_row.token_ids, ids)
    np.testing.assert_allclose(every_row.probabilities, shares, rtol=2e-3)
    ids, shares = choices(further, head)
    np.testing.assert_array_equal(chain.token_ids, [every_row.token_ids[-1], *ids])
    np.testing.assert_allclose(chain.probabilities[1:], shares, rtol=2e-3)


@pytest.mark.parametrize("quantization", ["auto", "int8", "int4"])
@pytest.mark.parametrize("name", VARIANTS)
def test_native_is_close_to_torch(model: TinyModel, name: str, quantization: str) -> None:
    head, tokens = random_head(name), tokens_of(2, LENGTH + 1)
    rounded = replace(model, weights=rounded_weights(model.weights, quantization))
    (expected,) = torch_drafter(rounded, head).first([(Fed(tokens), LENGTH)])
    native = native_drafter(model, head, quantization=quantization)
    (drafted,) = native.first([(Fed(tokens), LENGTH)])
    equal = drafted.token_ids == expected.token_ids
    # Some choices are between near equals.
    assert equal.mean() > 0.8
    error = np.abs(drafted.probabilities - expected.probabilities)[equal]
    assert np.median(error) < 0.05
    assert error.max() < 0.35


@pytest.mark.parametrize("name", VARIANTS)
def test_native_goes_on_as_torch_does(model: TinyModel, name: str) -> None:
    head = random_head(name)
    sequences = [tokens_of(seed, LENGTH + 1) for seed in range(30, 54)]
    torch_chains = torch_drafter(model, head).chains([(Fed(t), LENGTH) for t in sequences], 3)
    chains = native_drafter(model, head).chains([(Fed(t), LENGTH) for t in sequences], 3)
    for step in (1, 2):
        # Where the tokens before are the same, so is nearly every next one.
        same = [
            (mine.token_ids[step], theirs.token_ids[step])
            for mine, theirs in zip(chains, torch_chains, strict=True)
            if np.array_equal(mine.token_ids[:step], theirs.token_ids[:step])
        ]
        assert len(same) >= 12
        assert np.mean([mine == theirs for mine, theirs in same]) > 0.7


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "wider"])
def test_drafting_is_what_training_computes(model: TinyModel, name: str) -> None:
    head, tokens = random_head(name, seed=4), tokens_of(5, LENGTH + 1)
    drafter = torch_drafter(model, head)
    (every_row,) = drafter.first([(Fed(tokens), LENGTH)])
    features = torch.cat(list(drafter.draft.target_features), dim=-1)
    (chain,) = drafter.chains([(Fed(tokens), LENGTH)], NUM_DRAFTS)
    module = load_draft_module(head)
    table = torch.from_numpy(embedding_of(model, head))
    # The last row's chain alone: pass i embeds the token that the pass before it drafted.
    ids = [*tokens[1:], *chain.token_ids.tolist()]
    seen: list[PassKeys] = []
    with torch.no_grad():
        feature = module.first_feature(features)
        for index in range(NUM_DRAFTS):
            embedded = table[torch.tensor(ids[index : index + LENGTH])]
            output, own = module(embedded, feature, seen)
            seen.append(own)
            feature = module.next_feature(output)
            columns = module.logits(output).argmax(-1).numpy()
            expected = columns if head.draft_ids is None else head.draft_ids[columns]
            if index == 0:
                np.testing.assert_array_equal(every_row.token_ids, expected)
            assert chain.token_ids[index] == expected[-1]


def test_far_positions_turn_on(model: TinyModel) -> None:
    head = random_head("plain")
    far = replace(head, config=replace(head.config, rope=RopeConfig(theta=500.0)))
    tokens = tokens_of(6, 1001)
    for make in (native_drafter, torch_drafter):
        drafter = make(model, far)
        (whole,) = drafter.first([(Fed(tokens), 1000)])
        assert np.isfinite(whole.probabilities).all()
        fed = Fed(tokens)
        drafter.first([(fed, 999)])
        (last,) = drafter.first([(fed, 1)])
        np.testing.assert_allclose(last.probabilities, whole.probabilities[-1:], rtol=1e-4)
        np.testing.assert_array_equal(last.token_ids, whole.token_ids[-1:])


def test_a_head_s_own_embedding_is_read(model: TinyModel) -> None:
    tokens = tokens_of(7, LENGTH + 1)
    shared, own = random_head("plain"), random_head("plain", own_embedding=True)
    same = dict(own.weights.arrays)
    same["embed_tokens.weight"] = model.weights.arrays["model.embed_tokens.weight"]
    copied = replace(own, weights=ArrayWeights(same))
    for make in (native_drafter, torch_drafter):
        drafted = [
            make(model, head).first([(Fed(tokens), LENGTH)])[0] for head in (own, copied, shared)
        ]
        assert (drafted[0].token_ids != drafted[1].token_ids).any()
    arrays = {name: array for name, array in same.items() if name != "embed_tokens.weight"}
    taken = replace(own, weights=ArrayWeights(arrays))
    for make in (native_drafter, torch_drafter):
        first, second = (
            make(model, head).first([(Fed(tokens), LENGTH)])[0] for head in (copied, taken)
        )
        np.testing.assert_array_equal(first.token_ids, second.token_ids)


def with_config(head: DraftHead, **changes: object) -> DraftHead:
    return replace(head, config=replace(head.config, **changes))


def without(head: DraftHead, *names: str) -> DraftHead:
    arrays = {name: array for name, array in head.weights.arrays.items() if name not in names}
    return replace(head, weights=ArrayWeights(arrays))


@pytest.mark.parametrize("make", [native_drafter, torch_drafter])
def test_heads_that_do_not_fit_are_refused(model: TinyModel, make: object) -> None:
    plain, wider = random_head("plain"), random_head("wider")
    for head, message in (
        (with_config(plain, target_hidden_size=64), "target_hidden_size 64 .* hidden_size 48"),
        (with_config(plain, feature_layers=(0, 1, 4)), "after 4 layers; it has 3"),
        (with_config(plain, feature_layers=()), "feature_layers are none"),
        (with_config(plain, vocab_size=132), "vocab_size 132"),
        (with_config(plain, num_kv_heads=3), "num_heads 4 is no multiple .* 3"),
        (with_config(plain, num_layers=0), "num_layers"),
        (with_config(plain, head_dim=16), "q_proj.weight is .128, 96., not .64, 96."),
        (without(plain, "norm.weight", "fc.weight"), "draft head lacks 2 tensors"),
        (without(wider, "embed_tokens.weight"), "no embed_tokens.weight.* 64 .* 48"),
        (with_config(wider, uses_features=False), "no fc between"),
    ):
        with pytest.raises(ModelError, match=message):
            make(model, head)


def test_the_native_kernels_say_which_width_they_lack(model: TinyModel) -> None:
    with pytest.raises(ModelError, match="head_dim 24 is not a multiple of 16"):
        native_drafter(model, with_config(random_head("plain"), head_dim=24))
