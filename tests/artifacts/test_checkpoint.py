"""Opening folders and files, and the agreement of config and tensors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.checkpoint_files import (
    f32_entries,
    safetensors_bytes,
    write_json,
    write_model_folder,
)
from support.default_model import default_model_path
from twinfire.artifacts.checkpoint import open_checkpoint
from twinfire.protocol.errors import ModelError


def rewrite(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    (folder / "model.safetensors").write_bytes(safetensors_bytes(f32_entries(arrays)))


def test_a_folder_gives_its_parts(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    arrays = write_model_folder(folder, tie_word_embeddings=False, torch_dtype=None)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.name == "my-model"
    assert checkpoint.path == folder
    assert checkpoint.config.dtype == "f32"
    assert set(checkpoint.weights) == set(arrays)
    assert checkpoint.weights is checkpoint.weights
    assert checkpoint.chat_template() is None
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        checkpoint.tokenizer()


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    arrays = write_model_folder(tmp_path)
    del arrays["model.layers.1.mlp.up_proj.weight"]
    rewrite(tmp_path, arrays)
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight' is missing"):
        _ = open_checkpoint(tmp_path).weights


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    arrays = write_model_folder(tmp_path)
    arrays["model.norm.weight"] = np.zeros(63)
    rewrite(tmp_path, arrays)
    with pytest.raises(ModelError, match=r"'model\.norm\.weight' has shape \[63\], .* \[64\]"):
        _ = open_checkpoint(tmp_path).weights


@pytest.mark.parametrize(
    "name", ["model.layers.2.input_layernorm.weight", "model.layers.0.self_attn.q_proj.bias"]
)
def test_a_tensor_that_the_config_does_not_know_is_named(tmp_path: Path, name: str) -> None:
    arrays = write_model_folder(tmp_path)
    rewrite(tmp_path, {**arrays, name: np.zeros(64)})
    with pytest.raises(ModelError, match=name):
        _ = open_checkpoint(tmp_path).weights


def test_harmless_extra_tensors_are_accepted(tmp_path: Path) -> None:
    arrays = write_model_folder(tmp_path)
    extra = {
        "lm_head.weight": arrays["model.embed_tokens.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8),
    }
    rewrite(tmp_path, {**arrays, **extra})
    assert "lm_head.weight" in open_checkpoint(tmp_path).weights


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "a.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match=r"it holds a\.gguf"):
        open_checkpoint(tmp_path)
    with pytest.raises(ModelError, match="is empty"):
        open_checkpoint(tmp_path / "a.gguf")
    with pytest.raises(ModelError, match="does not exist"):
        open_checkpoint(tmp_path / "b.gguf")
    (tmp_path / "c.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match="neither a model folder nor"):
        open_checkpoint(tmp_path / "c.bin")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": {"chat_template": "one"}}, "one"),
        ({"chat_template.json": {"chat_template": "two"}}, "two"),
        (
            {
                "tokenizer_config.json": {"chat_template": "one"},
                "chat_template.jinja": "three {{ bos_token }}",
                "special_tokens_map.json": {"bos_token": {"content": "<s>"}},
            },
            "three <s>",
        ),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [
                        {"name": "default", "template": "four"},
                        {"name": "tool_use", "template": "five"},
                    ]
                }
            },
            "four",
        ),
    ],
)
def test_where_a_folder_keeps_its_template(
    tmp_path: Path, files: dict[str, Any], expected: str
) -> None:
    write_model_folder(tmp_path)
    for name, content in files.items():
        if isinstance(content, str):
            (tmp_path / name).write_text(content)
        else:
            write_json(tmp_path / name, content)
    template = open_checkpoint(tmp_path).chat_template()
    assert template is not None
    assert template.render([{"role": "user", "content": "x"}]) == expected


def test_a_broken_template_file_is_named(tmp_path: Path) -> None:
    write_model_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("a\n{% for x in %}")
    with pytest.raises(ModelError, match="line 2"):
        open_checkpoint(tmp_path).chat_template()


def test_a_worker_imports_nothing_of_the_text_side() -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from twinfire.artifacts.checkpoint import open_checkpoint\n"
        f"open_checkpoint(Path({str(default_model_path())!r})).weights\n"
        "heavy = {'tokenizers', 'jinja2', 'torch', 'transformers', 'gguf'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
