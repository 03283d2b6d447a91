"""A probe counts what it should, and finds that a head reads the wrong layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from support.draft_heads import write_head
from support.tiny_models import TinyModel, tiny_model
from twinfire.artifacts.draft_head import DraftHead, open_draft_head
from twinfire.training.draft_probe import DraftProbe, neighbours, text_samples
from twinfire.training.sample import Sample

NUM_DRAFTS = 2
CONSTANT = [7] * 60
"""On one token over and over the target soon says the same thing in every row."""


class Opened:
    """As much of a checkpoint as a probe reads."""

    def __init__(self, tiny: TinyModel) -> None:
        self.config = tiny.config
        self.weights = tiny.weights


@pytest.fixture(scope="module")
def target() -> Opened:
    # Of this seed the state one layer before the last says another token than the last.
    return Opened(tiny_model("llama", seed=5))


def echoing_head(folder: Path, target: Opened, ids: list[int], *, full: bool = True) -> DraftHead:
    """A head that says what the target said a row before, if its last feature is the last state."""
    arrays, width = target.weights.arrays, 48
    fc = torch.zeros(width, 3 * width)
    fc[:, 2 * width :] = torch.eye(width)
    sizes = {"q": (96, 96), "k": (48, 96), "v": (48, 96), "o": (48, 96)}
    tensors = {
        "fc.weight": fc if full else torch.zeros_like(fc),
        "norm.weight": torch.tensor(arrays["model.norm.weight"]),
        "lm_head.weight": torch.tensor(arrays["lm_head.weight"]),
        **{f"midlayer.self_attn.{n}_proj.weight": torch.zeros(s) for n, s in sizes.items()},
        "midlayer.mlp.gate_proj.weight": torch.zeros(88, 48),
        "midlayer.mlp.up_proj.weight": torch.zeros(88, 48),
        "midlayer.mlp.down_proj.weight": torch.zeros(48, 88),
        "midlayer.hidden_norm.weight": torch.ones(48),
        "midlayer.input_layernorm.weight": torch.ones(48),
        "midlayer.post_attention_layernorm.weight": torch.ones(48),
    }
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": 48,
        "intermediate_size": 88,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 16,
        "vocab_size": 131,
        "draft_vocab_size": 131,
        "rms_norm_eps": 1e-5,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": ids,
            "aux_layer_convention": "layers_passed",
        },
    }
    return open_draft_head(write_head(folder, config, tensors), target.config)


def probe(target: Opened, head: DraftHead) -> DraftProbe:
    return DraftProbe(target, head, NUM_DRAFTS)  # type: ignore[arg-type]


def test_layers_read_one_off_are_found(tmp_path: Path, target: Opened) -> None:
    wrong = echoing_head(tmp_path / "wrong", target, [0, 1, 2])
    samples = text_samples(CONSTANT, NUM_DRAFTS)
    report = probe(target, wrong).measure(samples, written_by_target=False, max_layer_tokens=100)
    assert list(report.by_layers) == [(0, 1, 2), (1, 2, 3)]
    assert report.better_layers() == (1, 2, 3)
    assert report.by_layers[1, 2, 3].rates()[0] > 0.9
    right = echoing_head(tmp_path / "right", target, [1, 2, 3])
    report = probe(target, right).measure(samples, written_by_target=False, max_layer_tokens=100)
    assert report.better_layers() is None
    assert report.by_domain["text"].rates()[0] > 0.9


def test_a_text_of_the_targets_is_matched_token_by_token(tmp_path: Path, target: Opened) -> None:
    head = echoing_head(tmp_path, target, [1, 2, 3])
    said = int(target_says(target))
    samples = [
        Sample(CONSTANT, 1, "another's"),
        Sample([*CONSTANT, *[said] * 12], len(CONSTANT), "half its own"),
    ]
    report = probe(target, head).measure(samples, written_by_target=True, max_layer_tokens=0)
    assert report.by_layers == {}
    assert set(report.by_domain) == {"another's", "half its own"}
    # Row t drafts token t + 2: rows from the one whose first draft is the answer's first token.
    assert report.by_domain["half its own"].num_chains == 12 - NUM_DRAFTS + 1
    assert report.num_tokens == sum(len(sample.tokens) for sample in samples)
    is_right = said == CONSTANT[0]
    assert (report.by_domain["another's"].rates()[0] > 0.5) == is_right


def target_says(target: Opened) -> int:
    from twinfire.training.target_states import TargetStates

    states = TargetStates(target.config, target.weights, [3])
    (text,) = states.compute([CONSTANT])
    head = torch.tensor(target.weights.arrays["lm_head.weight"]).bfloat16()
    return int((text.final[-1] @ head.T).argmax())


def test_a_head_without_features_reads_the_final_state(tmp_path: Path, target: Opened) -> None:
    head = echoing_head(tmp_path / "with", target, [1, 2, 3])
    config = {
        **json.loads((tmp_path / "with" / "config.json").read_text()),
        "eagle_config": {"use_aux_hidden_state": False},
    }
    tensors = {
        name: torch.tensor(head.weights.tensor(name).to_float32().copy())
        for name in head.weights
        if name != "fc.weight"
    }
    # The final state is normed already; a second norm of ones leaves the order as it is.
    tensors["norm.weight"] = torch.ones(48)
    bare = open_draft_head(write_head(tmp_path / "without", config, tensors), target.config)
    samples = text_samples(CONSTANT, NUM_DRAFTS)
    report = probe(target, bare).measure(samples, written_by_target=False, max_layer_tokens=100)
    assert report.by_layers == {}
    assert report.by_domain["text"].rates()[0] > 0.9


def test_the_layers_beside() -> None:
    assert neighbours((2, 15, 27), 30) == [(2, 15, 27), (1, 14, 26), (3, 16, 28)]
    assert neighbours((0, 5, 30), 30) == [(0, 5, 30)]
    assert neighbours((), 30) == [()]


def test_a_long_text_is_cut_and_a_short_rest_left_out() -> None:
    samples = text_samples(range(2048 + 4), NUM_DRAFTS)
    assert [len(sample.tokens) for sample in samples] == [2048]
    assert text_samples([1, 2, 3, 4], NUM_DRAFTS) == []
