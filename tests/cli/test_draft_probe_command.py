"""`twinfire draft probe` as a user runs it, on a tiny model and a head over it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.checkpoint_files import HF_CONFIG
from support.draft_heads import write_head
from support.tiny_text_model import write_text_model
from twinfire.cli.main import main
from twinfire.training.sample import Sample, SampleFile

TEXT = "one two three, one two three, and so it goes on for a while\n" * 4
VOCAB = HF_CONFIG["vocab_size"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a model of four layers and a head over it."""
    model = tmp_path_factory.mktemp("model")
    write_text_model(model, num_hidden_layers=6)
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "fc.weight": (64, 192),
        "midlayer.self_attn.q_proj.weight": (64, 128),
        "midlayer.self_attn.k_proj.weight": (32, 128),
        "midlayer.self_attn.v_proj.weight": (32, 128),
        "midlayer.self_attn.o_proj.weight": (64, 64),
        "midlayer.mlp.gate_proj.weight": (96, 64),
        "midlayer.mlp.up_proj.weight": (96, 64),
        "midlayer.mlp.down_proj.weight": (64, 96),
        "midlayer.hidden_norm.weight": (64,),
        "midlayer.input_layernorm.weight": (64,),
        "midlayer.post_attention_layernorm.weight": (64,),
        "norm.weight": (64,),
        "lm_head.weight": (VOCAB, 64),
    }
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]},
    }
    return model, write_head(tmp_path_factory.mktemp("head"), config, tensors)


def probe(folders: tuple[Path, Path], *arguments: str) -> int:
    model, head = folders
    return main(["draft", "probe", str(model), "--head", str(head), *arguments])


def test_a_text_is_probed_under_its_layers_and_those_beside(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    assert probe(folders, "--text", str(file), "--drafts", "3") == 0
    output = capsys.readouterr().out
    num_chains = len(TEXT) - 1 - 3
    assert f"| text | {num_chains} |" in output
    assert "draft 3" in output
    assert "draft 4" not in output
    # 1, 3, 5 are outputs of layers, so states after one layer more; and 7 layers there are none.
    for layers, is_there in (("2, 4, 6", True), ("1, 3, 5", True), ("3, 5, 7", False)):
        assert (f"after {layers}" in output) == is_there
    assert probe(folders, "--text", str(file), "--aux-layer-ids", "1,3,5") == 0
    output = capsys.readouterr().out
    assert output.index("after 1, 3, 5") < output.index("after 2, 4, 6")


def test_samples_are_told_apart_by_domain_and_drawn(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = SampleFile(tmp_path / "samples.jsonl")
    tokens = list(range(10, 40))
    samples.append(Sample(tokens, 8, domain) for domain in ("chat", "code", "chat", "code"))
    plot = tmp_path / "curve.png"
    assert probe(folders, "--samples", str(samples.path), "--plot", str(plot)) == 0
    output = capsys.readouterr().out
    assert "| chat | " in output
    assert "| code | " in output
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert probe(folders, "--samples", str(samples.path), "--every", "2") == 0
    assert "| code | " not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--text", "absent.txt"), "absent.txt cannot be read"),
        (("--samples", "absent.jsonl"), "absent.jsonl is no file"),
        (("--text", "{short}"), "has 2 tokens; 7 are needed for chains of 4 drafts"),
        (("--text", "{short}", "--drafts", "0"), "must be 1 to 16, got 0"),
        (("--text", "{short}", "--every", "0"), "must be at least 1, got 0"),
        (("--text", "{short}", "--aux-layer-ids", "4,2,6"), "ascending from 0 to 6"),
        (("--text", "{short}", "--head", "absent"), "'absent' is neither a folder nor shipped"),
        (("--samples", "{foreign}"), "token 5000 is outside the model's vocabulary of 320"),
        (("--samples", "{brief}"), "has no sample that is long enough"),
    ],
)
def test_what_is_wrong_is_one_line(
    folders: tuple[Path, Path],
    tmp_path: Path,
    arguments: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = {name: tmp_path / name for name in ("short", "foreign", "brief")}
    files["short"].write_text("ab")
    SampleFile(files["foreign"]).append([Sample([5000] * 20, 4, "x")])
    SampleFile(files["brief"]).append([Sample([1] * 6, 4, "x")])
    assert probe(folders, *(argument.format(**files) for argument in arguments)) == 1
    assert message in capsys.readouterr().err


def test_a_model_without_a_shipped_head_says_so(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    assert main(["draft", "probe", str(folders[0]), "--text", str(file)]) == 1
    assert "no draft head is shipped for" in capsys.readouterr().err
