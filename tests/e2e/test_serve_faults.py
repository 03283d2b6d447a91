"""What `twinfire serve` says when it cannot start: one line, status 1, nothing left behind."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SERVE = [sys.executable, "-m", "twinfire.cli.main", "serve"]


def failed_start(*options: str) -> str:
    result = subprocess.run([*SERVE, *options], capture_output=True, text=True, timeout=120)
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr.strip().splitlines()[-1]


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port {port}" in failed_start("--port", str(port))


def test_an_unknown_model_lists_the_aliases() -> None:
    message = failed_start("no-such-model", "--port", "0")
    assert "no-such-model" in message
    assert "smollm2-135m" in message


def test_an_unsupported_architecture_lists_those_supported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["MambaForCausalLM"], "model_type": "mamba"})
    )
    message = failed_start(str(tmp_path), "--port", "0")
    assert "mamba" in message.lower()
    for name in ("llama", "mistral", "qwen2", "qwen3"):
        assert name in message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--kv-cache-memory", "10MiB"), ("cannot hold one sequence", "8192", "needs")),
        (("--max-model-len", "9000"), ("9000", "8192")),
        (("--dtype", "f16"), ("f16", "GPU")),
    ],
)
def test_settings_that_cannot_work_are_named_with_their_limit(
    options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    message = failed_start("--port", "0", "--threads", "1", *options)
    for word in words:
        assert word in message
