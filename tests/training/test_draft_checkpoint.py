"""A head that was trained here, opened as any published one; and found as a shipped one."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from support.tiny_models import TinyModel, tiny_model
from twinfire.artifacts.draft_head import open_draft_head
from twinfire.artifacts.model_config import ModelConfig, RopeConfig
from twinfire.artifacts.shipped_heads import find_shipped_head, resolve_draft_head, shipped_heads
from twinfire.artifacts.target_mark import likeness, mark_target
from twinfire.artifacts.tensors import MappedTensor
from twinfire.models.rope import rope_table
from twinfire.protocol.errors import ModelError
from twinfire.training.draft_checkpoint import write_draft_head
from twinfire.training.draft_loader import load_draft_module, target_token_ids
from twinfire.training.draft_module import DraftModule, DraftShape

SHAPE = DraftShape(
    hidden_size=48,
    intermediate_size=88,
    num_heads=6,
    num_kv_heads=3,
    head_dim=16,
    draft_vocab_size=32,
    rms_norm_eps=1e-5,
)
DRAFT_IDS = torch.arange(32) * 4 + 1
LAYERS = (1, 2, 3)


@dataclass
class Opened:
    """As much of a checkpoint as is looked at."""

    tiny: TinyModel
    name: str = "tiny"

    @property
    def config(self) -> ModelConfig:
        return self.tiny.config

    @property
    def weights(self) -> object:
        return self.tiny.weights


def write(folder: Path, target: Opened, shape: DraftShape = SHAPE) -> DraftModule:
    torch.manual_seed(0)
    table = rope_table(target.config.rope, 16)
    module = DraftModule(shape, torch.tensor(table.inv_freq), table.attention_factor)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.bfloat16())
    mark = mark_target(target.config, target.weights)  # type: ignore[arg-type]
    write_draft_head(folder, module, target.config, DRAFT_IDS, LAYERS, {"steps": 1}, mark)
    return module


ROPES = {
    "default": RopeConfig(theta=1e5),
    "linear": RopeConfig(kind="linear", factor=4.0),
    "llama3": RopeConfig(
        theta=5e5, kind="llama3", factor=8.0, original_max_position=128, high_freq_factor=3.0
    ),
    "yarn": RopeConfig(
        kind="yarn", factor=4.0, original_max_position=128, beta_fast=16.0, attention_factor=1.2
    ),
}


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"norm_before_residual": True, "norm_output": True, "fc_norm": True},
        {"norm_before_fc": True, "num_layers": 2},
    ],
    ids=["plain", "eagle-3.1", "two layers"],
)
def test_a_written_head_is_opened_as_it_was(
    tmp_path: Path, kind: str, flags: dict[str, bool | int]
) -> None:
    tiny = tiny_model("llama_tied")
    target = Opened(replace(tiny, config=replace(tiny.config, rope=ROPES[kind])))
    shape = replace(SHAPE, **flags)  # type: ignore[arg-type]
    module = write(tmp_path, target, shape)
    head = open_draft_head(tmp_path, target.config)
    assert head.config.rope == ROPES[kind]
    # Layers that another convention would count one higher are kept, for they say which.
    assert head.config.feature_layers == LAYERS
    assert target_token_ids(head).tolist() == DRAFT_IDS.tolist()
    loaded = load_draft_module(head)
    assert replace(loaded.shape, target_hidden_size=None) == shape
    state = loaded.state_dict()
    assert state.keys() == module.state_dict().keys()
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    torch.testing.assert_close(
        loaded.get_buffer("inv_freq"), module.get_buffer("inv_freq"), rtol=0, atol=0
    )


def shipped(tmp_path: Path) -> tuple[Path, Opened]:
    target = Opened(tiny_model("llama_tied"))
    write(tmp_path / "tiny-head", target)
    return tmp_path, target


def with_table(target: Opened, table: np.ndarray) -> Opened:
    weights = type(target.tiny.weights)(
        {**target.tiny.weights.arrays, "model.embed_tokens.weight": table.astype(np.float32)}
    )
    return Opened(replace(target.tiny, weights=weights))


def resolve(option: str | None, target: Opened, folder: Path) -> tuple[int, ...]:
    head = resolve_draft_head(option, target, shipped_folder=folder)  # type: ignore[arg-type]
    return head.config.feature_layers


def test_a_target_gets_the_head_of_its_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, target = shipped(tmp_path)
    assert shipped_heads(folder) == ["tiny-head"]
    with caplog.at_level(logging.WARNING):
        assert resolve(None, target, folder) == LAYERS
        assert resolve("tiny-head", target, folder) == LAYERS
        assert resolve(str(folder / "tiny-head"), target, folder) == LAYERS
    assert caplog.text == ""


def test_near_weights_get_it_with_a_note_and_others_do_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, target = shipped(tmp_path)
    table = target.tiny.weights.arrays["model.embed_tokens.weight"]
    rng = np.random.default_rng(0)
    tuned = with_table(target, table + rng.normal(0, 0.01, table.shape))
    assert resolve(None, tuned, folder) == LAYERS
    assert "trained for other weights than tiny has" in caplog.text
    caplog.clear()
    other = with_table(target, rng.normal(0, 0.2, table.shape))
    assert find_shipped_head(other, folder) is None  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"no draft head is shipped for tiny \(3 layers of width"):
        resolve(None, other, folder)
    assert caplog.text == ""
    # Asked for by name, it is taken, and told.
    assert resolve("tiny-head", other, folder) == LAYERS
    assert "trained for other weights" in caplog.text


def test_a_deeper_model_with_the_same_table_is_another(tmp_path: Path) -> None:
    folder, target = shipped(tmp_path)
    deeper = Opened(replace(target.tiny, config=replace(target.config, num_layers=4)))
    assert find_shipped_head(deeper, folder) is None  # type: ignore[arg-type]


def test_names_that_lead_nowhere_say_what_there_is(tmp_path: Path) -> None:
    folder, target = shipped(tmp_path)
    with pytest.raises(ModelError, match="'absent' is neither a folder nor shipped; shipped are"):
        resolve("absent", target, folder)
    empty = tmp_path / "empty"
    with pytest.raises(ModelError, match="shipped are: none"):
        resolve(None, target, empty)
    broken = folder / "tiny-head" / "config.json"
    broken.write_text(broken.read_text().replace('"embedding_sha256"', '"sha"'))
    with pytest.raises(ModelError, match="'twinfire_target' is not a target's mark"):
        resolve(None, target, folder)


def test_a_table_in_another_format_is_akin() -> None:
    target = Opened(tiny_model("llama_tied"))
    table = target.tiny.weights.arrays["model.embed_tokens.weight"]
    mark = mark_target(target.config, target.weights)  # type: ignore[arg-type]

    class Rounded(type(target.tiny.weights)):  # type: ignore[misc]
        def tensor(self, name: str) -> MappedTensor:
            raw = (table.view(np.uint32) >> 16).astype(np.uint16)
            return MappedTensor(name, table.shape, "bf16", raw)

    assert likeness(mark, target.config, Rounded({})) == "akin"
    assert likeness(mark, target.config, target.weights) == "same"  # type: ignore[arg-type]
