"""safetensors files, whole and broken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from support.checkpoint_files import f32_entries, safetensors_bytes, write_json
from twinfire.artifacts.safetensors_source import INDEX_FILE, SINGLE_FILE, SafetensorsSource
from twinfire.protocol.errors import ModelError

ARRAYS = {"a.weight": np.arange(6.0).reshape(2, 3), "b.weight": np.arange(4.0) - 2}


def write_single(folder: Path, content: bytes) -> Path:
    (folder / SINGLE_FILE).write_bytes(content)
    return folder


def test_reads_what_the_formats_own_library_writes(tmp_path: Path) -> None:
    tensors = {
        "f32": torch.randn(3, 5),
        "f16": torch.randn(4, 2).half(),
        "bf16": torch.randn(7, 3).bfloat16(),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
    }
    save_file(tensors, tmp_path / SINGLE_FILE)
    source = SafetensorsSource(tmp_path)
    assert set(source) == set(tensors)
    for name, tensor in tensors.items():
        mapped = source.tensor(name)
        assert mapped.shape == tuple(tensor.shape)
        np.testing.assert_array_equal(mapped.to_float32(), tensor.float().numpy())
    assert source.total_bytes == sum(tensor.nbytes for tensor in tensors.values())


def test_content_is_mapped_not_copied(tmp_path: Path) -> None:
    source = SafetensorsSource(write_single(tmp_path, safetensors_bytes(f32_entries(ARRAYS))))
    raw = source.tensor("a.weight").raw
    assert raw.base is not None
    assert not raw.flags.writeable


def test_shards_are_found_through_the_index(tmp_path: Path) -> None:
    weight_map = {}
    for number, (name, array) in enumerate(ARRAYS.items()):
        file_name = f"model-{number}.safetensors"
        (tmp_path / file_name).write_bytes(safetensors_bytes(f32_entries({name: array})))
        weight_map[name] = file_name
    write_json(tmp_path / INDEX_FILE, {"metadata": {}, "weight_map": weight_map})
    source = SafetensorsSource(tmp_path)
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(source.tensor(name).to_float32(), array)
    assert "c.weight" not in source
    with pytest.raises(ModelError, match=r"c\.weight"):
        source.tensor("c.weight")


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a.weight": "absent.safetensors"}, r"absent\.safetensors is missing"),
        ({"z.weight": "one.safetensors"}, r"one\.safetensors has no tensor 'z\.weight'"),
        ({"a.weight": "../one.safetensors"}, "not a plain file name"),
        ({"a.weight": 3}, r"'a\.weight' must be a string"),
        ({}, "names no tensor"),
        (None, "'weight_map' is missing"),
    ],
)
def test_a_wrong_index_is_named(tmp_path: Path, weight_map: object, message: str) -> None:
    (tmp_path / "one.safetensors").write_bytes(safetensors_bytes(f32_entries(ARRAYS)))
    write_json(tmp_path / INDEX_FILE, {"weight_map": weight_map})
    with pytest.raises(ModelError, match=message):
        SafetensorsSource(tmp_path)


def entry(shape: Any, begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": entry([2, 3], 0, 24), "b": entry([4], 20, 36)}, "'a' and 'b' overlap"),
        ({"a": entry([2, 3], 0, 4000)}, "'a' lies at bytes"),
        ({"a": entry([2, 3], 24, 0)}, "'a' lies at bytes"),
        ({"a": entry([2, 2], 0, 24)}, r"'a' of shape \[2, 2\]"),
        ({"a": entry([-2, -3], 0, 24)}, "negative"),
        ({"a": entry([2, 3], -24, 0)}, "negative"),
        ({"a": entry("no", 0, 24)}, "header is not valid"),
        ({"a": {"dtype": "F32"}}, "header is not valid"),
        ([1, 2], "header is not valid"),
        ({"a": entry([2**40, 2**40], 0, 24)}, "'a' of shape"),
    ],
)
def test_a_wrong_header_is_named(tmp_path: Path, header: object, message: str) -> None:
    content = safetensors_bytes(f32_entries(ARRAYS), header=header)
    with pytest.raises(ModelError, match=message) as caught:
        SafetensorsSource(write_single(tmp_path, content))
    assert SINGLE_FILE in str(caught.value)


@pytest.mark.parametrize("kept", [0, 5, 40, -1])
def test_a_truncated_file_is_named(tmp_path: Path, kept: int) -> None:
    content = safetensors_bytes(f32_entries(ARRAYS))
    with pytest.raises(ModelError, match=SINGLE_FILE):
        SafetensorsSource(write_single(tmp_path, content[:kept]))


@pytest.mark.parametrize("length", [2**63, 2**27, 200])
def test_a_wild_header_length_reads_nothing(tmp_path: Path, length: int) -> None:
    with pytest.raises(ModelError, match="header of"):
        SafetensorsSource(write_single(tmp_path, length.to_bytes(8, "little") + b"{}" * 20))


def test_another_dtype_is_refused_when_asked_for(tmp_path: Path) -> None:
    entries = {"ids": ("I64", (2,), bytes(16)), **f32_entries(ARRAYS)}
    source = SafetensorsSource(write_single(tmp_path, safetensors_bytes(entries)))
    assert source.tensor("a.weight").shape == (2, 3)
    with pytest.raises(ModelError, match=r"'ids' has type I64; supported are F32, F16, BF16"):
        source.tensor("ids")


def test_a_folder_without_weights_says_what_is_expected(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"expected model\.safetensors"):
        SafetensorsSource(tmp_path)
