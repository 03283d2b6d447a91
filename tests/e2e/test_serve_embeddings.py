"""An embedding model in a folder, served as a user does and compared with transformers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from openai import BadRequestError, OpenAI
from transformers import Qwen3Config, Qwen3Model

from support.serve_process import serve_process
from support.tiny_text_model import write_text_model
from twinfire.artifacts.checkpoint import open_checkpoint
from twinfire.protocol.errors import ModelError

TEXTS = ["the river", "a longer text about a river that is longer than a block " * 3, "x"]


def embedding_folder(folder: Path) -> Qwen3Model:
    """Write a folder in the format of sentence-transformers: no head, no prefix in its names."""
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
    )
    model = Qwen3Model(config).float().eval()
    write_text_model(folder)
    model.save_pretrained(folder)
    stages = ("Transformer", "Pooling", "Normalize")
    modules = [
        {"type": f"sentence_transformers.models.{stage}", "path": f"{index}_{stage}"}
        for index, stage in enumerate(stages)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return model


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_parity_over_http(tmp_path: Path, backend: str) -> None:
    folder = tmp_path / "embedder"
    folder.mkdir()
    model = embedding_folder(folder)
    assert open_checkpoint(folder).config.pooling == "last"
    tokenizer = open_checkpoint(folder).tokenizer()
    options = ("--backend", backend, "--kv-cache-memory", "8MiB", str(folder))
    with (
        serve_process(tmp_path, *options) as server,
        OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        answer = client.embeddings.create(model="embedder", input=TEXTS)
        with pytest.raises(BadRequestError, match="embeds texts"):
            client.completions.create(model="embedder", prompt="x", max_tokens=2)
    for text, one in zip(TEXTS, answer.data, strict=True):
        ids = torch.tensor([list(tokenizer.encode(text, True))])
        with torch.inference_mode():
            state = model(ids).last_hidden_state[0, -1].numpy()
        expected = state / np.linalg.norm(state)
        if backend == "torch":
            assert float(np.abs(np.array(one.embedding) - expected).max()) < 1e-4
        assert float(np.array(one.embedding) @ expected) > 0.999


def test_stages_that_are_not_computed_are_refused(tmp_path: Path) -> None:
    embedding_folder(tmp_path)
    pooling = tmp_path / "1_Pooling" / "config.json"
    pooling.write_text(json.dumps({"pooling_mode_cls_token": True}))
    with pytest.raises(ModelError, match="pooling_mode_lasttoken"):
        _ = open_checkpoint(tmp_path).config
    modules = [
        {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
        {"type": "sentence_transformers.models.Dense", "path": "2_Dense"},
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelError, match="Dense"):
        _ = open_checkpoint(tmp_path).config
