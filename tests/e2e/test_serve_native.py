"""The native backend behind `twinfire serve`, on a machine that has no torch."""

from __future__ import annotations

import json
import os
import re
import urllib.request
from pathlib import Path

import pytest

from support.default_model import default_model_path
from support.serve_process import ServeProcess, serve_process
from twinfire.artifacts.checkpoint import open_checkpoint
from twinfire.protocol.errors import ModelError
from twinfire.protocol.worker_config import WorkerConfig
from twinfire.worker.backend import load_backend

NO_TORCH = "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n"


@pytest.fixture
def no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "torch.py").write_text(NO_TORCH)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def completion(server: ServeProcess) -> str:
    body = {
        "model": "smollm2-135m",
        "prompt": "The capital of France is",
        "max_tokens": 12,
        "temperature": 0,
    }
    request = urllib.request.Request(
        server.url + "/v1/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["choices"][0]["text"]


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ((), "q4_1"),
        (("--quantization", "int8", "--kv-cache-dtype", "int8"), "int8"),
        (("--quantization", "none"), "bf16"),
    ],
)
def test_serves_without_torch(
    no_torch: None, tmp_path: Path, options: tuple[str, ...], dtype: str
) -> None:
    with serve_process(tmp_path, "--max-model-len", "256", *options) as server:
        assert "Paris" in completion(server)
        assert f", {dtype})" in server.output()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"backend": "torch", "quantization": "int8"}, ("int8", "native")),
        ({"backend": "torch", "kv_cache_dtype": "int8"}, ("kv-cache-dtype int8", "native")),
        ({"backend": "native", "dtype": "f32"}, ("native", "f32")),
        ({"dtype": "f16"}, ("f16", "GPU")),
    ],
)
def test_what_no_backend_can_do_is_said(settings: dict[str, str], words: tuple[str, ...]) -> None:
    path = default_model_path()
    config = WorkerConfig(model_path=str(path), served_name="m", socket_path="", **settings)
    with pytest.raises(ModelError) as raised:
        load_backend(config, open_checkpoint(path), lambda *_: None)
    for word in words:
        assert word in str(raised.value)


def test_a_setting_that_takes_torch_says_so_where_there_is_none(
    no_torch: None, tmp_path: Path
) -> None:
    with serve_process(tmp_path, "--dtype", "f32", ready=False) as server:
        assert server.process.wait(60) == 1
        assert "pip install 'twinfire[torch]'" in server.output()
        assert "Traceback" not in server.output()


def stages_of(server: ServeProcess) -> dict[tuple[str, str], float]:
    _, body = server.get("/metrics")
    labels = re.compile(r'startup_stage_seconds{.*process="(\w+)",stage="([\w ]+)"} (\S+)')
    return {(process, stage): float(s) for process, stage, s in labels.findall(body.decode())}


def test_the_second_start_reads_what_the_first_has_packed(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with serve_process(tmp_path, "--max-model-len", "256", weight_cache=cache) as server:
        first = completion(server)
    # A server that is asked to stop finishes what it was writing.
    (path,) = cache.iterdir()
    inode = path.stat().st_ino
    os.utime(path, (1, 1))
    with serve_process(tmp_path, "--max-model-len", "256", weight_cache=cache) as server:
        # A file that is used is marked so, and never written anew.
        assert path.stat().st_mtime > 1
        assert path.stat().st_ino == inode
        assert completion(server) == first
        stages = stages_of(server)
        assert {("worker", "weights"), ("worker", "process"), ("gateway", "tokenizer")} <= set(
            stages
        )
        assert all(0 <= seconds < 60 for seconds in stages.values())
        memory = re.search(r"weights and KV: gateway (\d+) MB, worker (\d+) MB", server.output())
        assert memory is not None
        assert sum(map(int, memory.groups())) < 400
