"""GGUF files: container, names, row order, and damage."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest

from support.checkpoint_files import GgufBuilder, permuted, random_arrays
from support.default_model import default_model_path
from twinfire.artifacts.checkpoint import open_checkpoint
from twinfire.artifacts.gguf_file import GgufFile
from twinfire.artifacts.gguf_source import GgufSource
from twinfire.artifacts.model_config import ModelConfig
from twinfire.artifacts.tensor_layout import expected_shapes
from twinfire.protocol.errors import ModelError

CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=320,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    max_position=512,
    tie_word_embeddings=True,
)
HEADS = {"q_proj": 4, "k_proj": 2}
OPEN_BUDGET_S = 0.5
DEQUANTISE_BUDGET_S = 4.0
"""Several times what an idle core needs, for a machine that is busy."""


def tiny_file(path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    arrays = random_arrays(expected_shapes(CONFIG))
    builder = GgufBuilder(path).add_sizes().add_arrays(arrays, HEADS)
    return builder.save(), arrays


def test_tensors_come_under_hugging_face_names_and_in_its_row_order(tmp_path: Path) -> None:
    path, arrays = tiny_file(tmp_path / "tiny.gguf")
    source = open_checkpoint(path).weights
    assert set(source) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(source.tensor(name).to_float32(), array)
    assert source.total_bytes == sum(array.nbytes for array in arrays.values())


def test_quantised_rows_are_reordered_without_dequantising(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    rows = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    quantised = gguf.quantize(rows, gguf.GGMLQuantizationType.Q8_0)
    in_place = gguf.dequantize(quantised, gguf.GGMLQuantizationType.Q8_0)
    builder = GgufBuilder(tmp_path / "q.gguf")
    builder.writer.add_tensor(
        "blk.0.attn_q.weight",
        permuted(quantised, 4),
        raw_dtype=gguf.GGMLQuantizationType.Q8_0,
    )
    tensor = GgufSource(GgufFile(builder.save()), HEADS).tensor(name)
    assert tensor.format == "q8_0"
    assert tensor.shape == (64, 64)
    assert tensor.raw.dtype == np.uint8
    np.testing.assert_array_equal(tensor.to_float32(), in_place)


def test_metadata_equals_the_librarys(tmp_path: Path) -> None:
    builder = GgufBuilder(tmp_path / "m.gguf")
    writer = builder.writer
    writer.add_float32("a.f32", 1e-5)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_int64("a.i64", -(2**40))
    writer.add_string("a.text", "naïve ▁ 日本")
    writer.add_array("a.strings", ["x", "", "▁y"])
    writer.add_array("a.floats", [0.5, -1.5])
    writer.add_uint8("a.last", 255)
    writer.add_tensor("t", np.zeros((2, 32), np.float32))
    file = GgufFile(builder.save())
    assert file.fields.raw("a.f32") == 1e-5
    assert file.fields.raw("a.f64") == 0.1
    assert file.fields.flag("a.bool") is True
    assert file.fields.raw("a.i64") == -(2**40)
    assert file.fields.text("a.text") == "naïve ▁ 日本"
    assert file.strings("a.strings") == ["x", "", "▁y"]
    numbers = file.numbers("a.floats")
    assert numbers is not None
    assert numbers.tolist() == [0.5, -1.5]
    assert file.fields.integer("a.last") == 255
    assert file.strings("absent") == []
    with pytest.raises(ModelError, match=r"a\.floats"):
        file.strings("a.floats")
    with pytest.raises(ModelError, match=r"a\.text"):
        file.strings("a.text")


def test_an_unsupported_quantisation_is_named(tmp_path: Path) -> None:
    builder = GgufBuilder(tmp_path / "q.gguf")
    raw = np.zeros((4, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.Q5_0][1]), np.uint8)
    builder.writer.add_tensor("blk.0.attn_q.weight", raw, raw_dtype=gguf.GGMLQuantizationType.Q5_0)
    with pytest.raises(ModelError, match=r"attn_q\.weight' has type q5_0; supported are f32.*q6_k"):
        GgufSource(GgufFile(builder.save()), {})


def test_a_tensor_of_no_known_place_is_refused(tmp_path: Path) -> None:
    builder = GgufBuilder(tmp_path / "moe.gguf")
    builder.writer.add_tensor("blk.0.ffn_gate_exps.weight", np.zeros((2, 32), np.float32))
    with pytest.raises(ModelError, match="ffn_gate_exps"):
        GgufSource(GgufFile(builder.save()), {})


def test_every_truncation_is_an_error(tmp_path: Path) -> None:
    path, _ = tiny_file(tmp_path / "tiny.gguf")
    content = path.read_bytes()
    cut_path = tmp_path / "cut.gguf"
    lengths = [0, 3, 8, 30, *range(64, len(content), len(content) // 40), len(content) - 1]
    for length in lengths:
        cut_path.write_bytes(content[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            _ = open_checkpoint(cut_path).weights


def test_damaged_headers_never_crash(tmp_path: Path) -> None:
    path, _ = tiny_file(tmp_path / "tiny.gguf")
    content = bytearray(path.read_bytes())
    damaged_path = tmp_path / "damaged.gguf"
    rng = np.random.default_rng(1)
    num_refused = 0
    for _ in range(300):
        damaged = bytearray(content)
        position = int(rng.integers(0, 1500))
        damaged[position : position + 4] = rng.bytes(4)
        damaged_path.write_bytes(damaged)
        try:
            source = open_checkpoint(damaged_path).weights
        except ModelError:
            num_refused += 1
            continue
        for name in source:
            source.tensor(name)
    assert num_refused > 100


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"GGML" + bytes(40), "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "past the end"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "past the end"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62), "past the end"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**64 - 1), "past the end"),
    ],
)
def test_other_containers_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        GgufFile(path)


def test_the_default_model_opens_fast_and_dequantises_whole() -> None:
    path = default_model_path()
    started_s = time.perf_counter()
    checkpoint = open_checkpoint(path)
    weights = checkpoint.weights
    assert time.perf_counter() - started_s < OPEN_BUDGET_S
    started_s = time.perf_counter()
    num_values = sum(weights.tensor(name).to_float32().size for name in weights)
    assert time.perf_counter() - started_s < DEQUANTISE_BUDGET_S
    assert num_values == 134_515_008
    assert checkpoint.config.dtype == "q4_1"
    assert checkpoint.config.eos_token_ids == (2,)
