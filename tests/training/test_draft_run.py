"""A whole run on a tiny model: it learns, it goes on where it stopped, its head is the published
layout."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from support.tiny_models import TinyModel, tiny_model
from twinfire.artifacts.model_config import ModelConfig
from twinfire.protocol.errors import InvalidRequest
from twinfire.training.draft_run import DraftRun, RunReport, RunSettings, feature_layers_of
from twinfire.training.draft_trainer import TrainSettings
from twinfire.training.feature_store import FeatureStore
from twinfire.training.sample import Sample, SampleFile
from twinfire.training.target_states import TargetStates


@dataclass
class Opened:
    """As much of a checkpoint as a run reads."""

    tiny: TinyModel

    @property
    def config(self) -> ModelConfig:
        return self.tiny.config

    @property
    def weights(self) -> object:
        return self.tiny.weights


def four_layers() -> Opened:
    from dataclasses import replace

    import numpy as np

    tiny = tiny_model("llama_tied")
    arrays = tiny.weights.arrays
    for name in [name for name in arrays if name.startswith("model.layers.2.")]:
        arrays[name.replace("layers.2.", "layers.3.")] = np.array(arrays[name])
    return Opened(TinyModel(replace(tiny.config, num_layers=4), tiny.weights, tiny.reference))


def samples(count: int) -> list[Sample]:
    """Texts of a rule that a head can learn from the tokens alone: each token is three more."""
    chooser = random.Random(0)
    made: list[Sample] = []
    for number in range(count):
        start, length = chooser.randrange(131), chooser.randrange(20, 40)
        tokens = [(start + 3 * i) % 131 for i in range(length)]
        made.append(Sample(tokens, 8, "even" if number % 2 else "odd"))
    return made


def train(
    work: Path, folder: Path, *, steps: int | None = None, epochs: int = 2, count: int = 60
) -> RunReport:
    settings = RunSettings(
        draft_vocab_size=64,
        train=TrainSettings(
            num_passes=3,
            num_epochs=epochs,
            samples_per_step=4,
            num_warmup_steps=2,
            holdout_every=5,
        ),
    )
    done = 0

    def progress(stage: str, *_: object) -> None:
        nonlocal done
        done += stage == "training"

    run = DraftRun(four_layers(), samples(count), work, settings, progress)  # type: ignore[arg-type]
    return run.run(folder, lambda: steps is not None and done >= steps)


def test_a_stopped_run_goes_on_to_the_same_head(tmp_path: Path) -> None:
    whole = train(tmp_path / "a", tmp_path / "whole")
    train(tmp_path / "b", tmp_path / "part", steps=7)
    train(tmp_path / "b", tmp_path / "part", steps=4)
    resumed = train(tmp_path / "b", tmp_path / "rest")
    assert resumed.num_steps == whole.num_steps == 24
    first = load_file(tmp_path / "whole" / "model.safetensors")
    second = load_file(tmp_path / "rest" / "model.safetensors")
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], rtol=0, atol=0)


def test_other_samples_or_a_changed_one_are_computed_anew_and_more_are_added(
    tmp_path: Path,
) -> None:
    tiny = four_layers()
    target = TargetStates(tiny.config, tiny.weights, (1, 2), max_tokens=64)  # type: ignore[arg-type]
    texts = samples(9)
    other = Sample(texts[6].tokens[::-1], 8, "even")

    def store(content: list[Sample], source: str = "a") -> FeatureStore:
        width = tiny.config.hidden_size
        return FeatureStore(tmp_path / "features.bin", content, 2 * width, width, source)

    store(texts[:7]).fill(target, lambda *_: None)
    assert store(texts[:7]).num_complete == store(texts).num_complete == 7
    assert store([*texts[:6], other, *texts[7:]]).num_complete == 6
    assert store(texts, "another target").num_complete == 0
    changed = store([*texts[:6], other])
    changed.fill(target, lambda *_: None)
    assert changed.num_complete == 7
    (expected,) = target.compute([other.tokens])
    torch.testing.assert_close(changed.states(6).features, expected.features, rtol=0, atol=0)


def test_many_short_samples_take_more_blocks_than_one_step_has(tmp_path: Path) -> None:
    tiny = four_layers()
    target = TargetStates(tiny.config, tiny.weights, (1,), max_tokens=128)  # type: ignore[arg-type]
    width = tiny.config.hidden_size
    texts = [Sample([number, 5, 6, 7], 1, "short") for number in range(40)]
    store = FeatureStore(tmp_path / "features.bin", texts, width, width, "a")
    store.fill(target, lambda *_: None)
    assert store.num_complete == 40


def test_a_checkpoint_of_another_draft_vocabulary_is_not_gone_on_from(tmp_path: Path) -> None:
    train(tmp_path / "work", tmp_path / "head", steps=2, count=10)
    with pytest.raises(InvalidRequest, match="other samples"):
        train(tmp_path / "work", tmp_path / "head", count=12)


def test_tokens_that_the_model_does_not_have_are_named(tmp_path: Path) -> None:
    foreign = [*samples(30), Sample([1, 2, 131], 1, "foreign")]
    with pytest.raises(InvalidRequest, match=r"sample 30: .* 1 to 131"):
        DraftRun(four_layers(), foreign, tmp_path, RunSettings(64), lambda *_: None)  # type: ignore[arg-type]


def test_the_head_has_the_published_layout(tmp_path: Path) -> None:
    train(tmp_path / "work", tmp_path / "head", epochs=1)
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    # The names and shapes of yuhuili/EAGLE3-LLaMA3.1-Instruct-8B, at this model's sizes.
    assert shapes == {
        "fc.weight": (48, 144),
        "midlayer.self_attn.q_proj.weight": (96, 96),
        "midlayer.self_attn.k_proj.weight": (48, 96),
        "midlayer.self_attn.v_proj.weight": (48, 96),
        "midlayer.self_attn.o_proj.weight": (48, 96),
        "midlayer.mlp.gate_proj.weight": (88, 48),
        "midlayer.mlp.up_proj.weight": (88, 48),
        "midlayer.mlp.down_proj.weight": (48, 88),
        "midlayer.hidden_norm.weight": (48,),
        "midlayer.input_layernorm.weight": (48,),
        "midlayer.post_attention_layernorm.weight": (48,),
        "norm.weight": (48,),
        "lm_head.weight": (64, 48),
        "d2t": (64,),
        "t2d": (131,),
    }
    ids = torch.arange(64) + tensors["d2t"]
    assert ids.tolist() == tensors["t2d"].nonzero().flatten().tolist()
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["draft_vocab_size"] == 64
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]


def test_training_teaches_the_target(tmp_path: Path) -> None:
    """The target is random and its entropy is a floor under the loss, which still falls."""
    losses: list[float] = []

    def progress(stage: str, _done: int, _total: int, note: str) -> None:
        if stage == "training":
            losses.append(float(note.removeprefix("loss ")))

    settings = RunSettings(
        draft_vocab_size=64,
        train=TrainSettings(
            num_passes=3, num_epochs=12, num_warmup_steps=2, holdout_every=5, learning_rate=5e-3
        ),
    )
    run = DraftRun(four_layers(), samples(60), tmp_path / "work", settings, progress)  # type: ignore[arg-type]
    run.run(tmp_path / "head")
    assert sum(losses[-10:]) < 0.85 * sum(losses[:10])


def test_the_feature_layers_of_a_deep_and_of_a_shallow_model() -> None:
    assert feature_layers_of(30) == (2, 15, 27)
    assert feature_layers_of(32) == (2, 16, 29)
    assert feature_layers_of(4) == (1, 2, 3)
    with pytest.raises(InvalidRequest, match="3 layers"):
        feature_layers_of(3)


def test_a_half_written_line_is_dropped_and_a_broken_one_is_named(tmp_path: Path) -> None:
    file = SampleFile(tmp_path / "samples.jsonl")
    assert list(file.read()) == []
    file.append(samples(3))
    with file.path.open("ab") as raw:
        raw.write(b'{"tokens": [1, 2')
    assert list(file.read()) == samples(3)
    file.append(samples(1))
    assert list(file.read()) == [*samples(3), *samples(1)]
    file.path.write_bytes(b'{"tokens": [1, 2], "answer_start": 2, "domain": "x"}\n')
    with pytest.raises(InvalidRequest, match=r"line 1: `answer_start` is 2"):
        list(file.read())
    file.path.write_bytes(b"nonsense\n")
    with pytest.raises(InvalidRequest, match="line 1"):
        list(file.read())
