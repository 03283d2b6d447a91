"""torch's own files, read without torch, and files that would run something or are broken."""

from __future__ import annotations

import contextlib
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twinfire.artifacts.torch_file_source import TorchFileSource
from twinfire.protocol.errors import ModelError


def saved(path: Path, value: object, **options: bool) -> Path:
    torch.save(value, path, **options)
    return path


def test_every_type_is_read_as_it_was_saved(tmp_path: Path) -> None:
    base = torch.randn(6, 4)
    tensors: dict[str, torch.Tensor] = {
        "f32": base,
        "rows of f32": base[2:4],
        "f16": torch.randn(3, 5).half(),
        "bf16": torch.randn(7).bfloat16(),
        "parameter": torch.nn.Parameter(torch.randn(2, 2)),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
    }
    integers = {
        "i64": torch.tensor([2**40, -1]),
        "i32": torch.tensor([3], dtype=torch.int32),
        "bool": torch.tensor([True, False]),
    }
    source = TorchFileSource(saved(tmp_path / "a.bin", {**tensors, **integers}))
    assert set(source) == {*tensors, *integers}
    for name, tensor in tensors.items():
        assert source.shape(name) == tuple(tensor.shape)
        found = source.tensor(name).to_float32()
        np.testing.assert_array_equal(found, tensor.detach().float().numpy())
    for name, tensor in integers.items():
        assert source.integers(name).tolist() == [int(value) for value in tensor]
    with pytest.raises(ModelError, match="'i64' is of LongStorage; expected one of FloatStorage"):
        source.tensor("i64")
    with pytest.raises(ModelError, match="'f32' is of FloatStorage"):
        source.integers("f32")
    with pytest.raises(ModelError, match="no tensor 'absent'"):
        source.tensor("absent")


def test_a_modules_state_is_read(tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 2)
    source = TorchFileSource(saved(tmp_path / "a.bin", module.state_dict()))
    np.testing.assert_array_equal(
        source.tensor("weight").to_float32(), module.weight.detach().numpy()
    )


class _Command:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self._path),)


def test_nothing_in_the_file_is_run(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    path = tmp_path / "evil.bin"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"a": _Command(trap)}))
    with pytest.raises(ModelError, match=r"asks for \w+.mkdir.*convert it"):
        TorchFileSource(path)
    assert not trap.exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"\x80", b"garbage", pickle.dumps([1]), pickle.dumps({"a": 1}), pickle.dumps({2: "b"})],
)
def test_a_pickle_of_something_else_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.bin"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", content)
    with pytest.raises(ModelError, match="convert it"):
        TorchFileSource(path)


def test_files_of_another_form_say_how_to_convert(tmp_path: Path) -> None:
    legacy = saved(tmp_path / "a.bin", {"a": torch.ones(2)}, _use_new_zipfile_serialization=False)
    with pytest.raises(ModelError, match="is no zip file"):
        TorchFileSource(legacy)
    with pytest.raises(ModelError, match="not contiguous"):
        TorchFileSource(saved(tmp_path / "b.bin", {"a": torch.ones(3, 2).T}))
    path = saved(tmp_path / "c.bin", {"a": torch.ones(2)})
    with (
        zipfile.ZipFile(path) as archive,
        zipfile.ZipFile(tmp_path / "packed.bin", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in archive.namelist():
            packed.writestr(name, archive.read(name))
    with pytest.raises(ModelError, match="is compressed"):
        TorchFileSource(tmp_path / "packed.bin")


def test_a_tensor_beyond_its_content_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.bin", {"a": torch.ones(64)})
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(tmp_path / "short.bin", "w") as short:
        for name in archive.namelist():
            content = archive.read(name)
            short.writestr(name, content[:100] if name.endswith("data/0") else content)
    with pytest.raises(ModelError, match=r"needs bytes \[0, 256\) of data/0, which has 100"):
        TorchFileSource(tmp_path / "short.bin").tensor("a")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = saved(
        tmp_path_factory.mktemp("whole") / "a.bin", {"a": torch.ones(9), "b": torch.ones(2)}
    )
    return path.read_bytes()


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_damaged_file_is_an_error_of_the_model(
    whole: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    damaged = bytearray(whole)
    places = st.integers(0, len(whole) - 1)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(places)] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del damaged[data.draw(places) :]
    path = tmp_path_factory.getbasetemp() / "damaged.bin"
    path.write_bytes(damaged)
    with contextlib.suppress(ModelError):
        source = TorchFileSource(path)
        for name in source:
            source.tensor(name).to_float32()
