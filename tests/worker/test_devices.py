"""Which device a worker computes on, and what it says where it cannot."""

from __future__ import annotations

import pytest

from support.default_model import default_model_path
from twinfire.artifacts.checkpoint import open_checkpoint
from twinfire.cluster.cluster_file import read_cluster_file
from twinfire.protocol.errors import InvalidRequest, ModelError
from twinfire.protocol.worker_config import WorkerConfig, parse_device
from twinfire.worker.backend import load_backend


def config(**fields: object) -> WorkerConfig:
    return WorkerConfig(
        **{"model_path": "", "served_name": "m", "socket_path": "", **fields}  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:0", "cuda:11"])
def test_devices(device: str) -> None:
    assert parse_device(device) == device


@pytest.mark.parametrize("device", ["", "gpu", "cuda:", "cuda:x", "cpu:0", "cuda:-1"])
def test_what_is_no_device(device: str) -> None:
    with pytest.raises(ValueError, match="must be cpu, cuda or cuda:N"):
        parse_device(device)


def test_a_cluster_file_names_the_field(tmp_path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text("[model]\ndevice = 'gpu'\n")
    with pytest.raises(InvalidRequest, match=r"model\.device is 'gpu'"):
        read_cluster_file(path)


def test_the_native_kernels_compute_on_the_cpu_only() -> None:
    checkpoint = open_checkpoint(default_model_path())
    with pytest.raises(ModelError, match="device cuda takes torch"):
        load_backend(config(backend="native", device="cuda"), checkpoint, lambda *_: None)


def test_a_device_that_torch_does_not_see_is_named() -> None:
    checkpoint = open_checkpoint(default_model_path())
    with pytest.raises(ModelError, match="device 'cuda:99' was asked for and torch sees"):
        load_backend(config(device="cuda:99"), checkpoint, lambda *_: None)
