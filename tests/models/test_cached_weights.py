"""A model whose packed weights come from disk: the same bits, without packing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from support.default_model import default_model_path
from support.native_runners import load_native
from support.step_batches import Feeder
from support.tiny_models import tiny_model
from twinfire.artifacts.checkpoint import open_checkpoint
from twinfire.kernels.cpu.weight_cache import WeightCache

TOKENS = np.random.default_rng(3).integers(0, 131, 40).tolist()


def no_pause() -> None:
    pass


def fail_to_pack(*_: object) -> None:
    raise AssertionError("packed although there is a file")


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("name", ["llama_biased", "qwen3"])
def test_the_bits_are_those_of_weights_packed_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, quantization: str
) -> None:
    model, cache = tiny_model(name), WeightCache(tmp_path, 1 << 40, "content")
    uncached = load_native(model.config, model.weights, quantization)
    first = load_native(model.config, model.weights, quantization, cache=cache)
    first.save_weights(no_pause)
    monkeypatch.setattr("twinfire.kernels.cpu.weight_loader.pack_panels", fail_to_pack)
    second = load_native(model.config, model.weights, quantization, cache=cache)
    expected = Feeder(uncached).whole(TOKENS)
    np.testing.assert_array_equal(Feeder(first).whole(TOKENS), expected)
    np.testing.assert_array_equal(Feeder(second).whole(TOKENS), expected)
    assert second.weight_bytes == uncached.weight_bytes
    second.save_weights(no_pause)
    assert len(list(tmp_path.iterdir())) == 1


def test_quantisations_and_tensors_have_files_of_their_own(tmp_path: Path) -> None:
    model, cache = tiny_model("llama_biased"), WeightCache(tmp_path, 1 << 40, "content")
    for quantization in ("none", "int8", "int4"):
        load_native(model.config, model.weights, quantization, cache=cache).save_weights(no_pause)
    assert len(list(tmp_path.iterdir())) == 3


def test_block_tables_come_from_the_file_too(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(default_model_path())
    cache = WeightCache(tmp_path, 1 << 40, "content")
    first = load_native(checkpoint.config, checkpoint.weights, "auto", cache=cache)
    first.save_weights(no_pause)
    second = load_native(checkpoint.config, checkpoint.weights, "auto", cache=cache)
    tokens = list(range(100, 130))
    np.testing.assert_array_equal(Feeder(first).whole(tokens), Feeder(second).whole(tokens))
