"""A worker's log lines begin with what it is called, for many workers share one log."""

from __future__ import annotations

import subprocess
import sys

import pytest

from twinfire.protocol.worker_config import WorkerConfig, encode_worker_config


@pytest.mark.parametrize(
    ("name", "beginning"),
    [("org-m.decode-0", "org-m.decode-0 twinfire."), ("50%s", "50%s twinfire."), ("", "twinfire.")],
)
def test_lines_have_the_workers_name(name: str, beginning: str) -> None:
    config = WorkerConfig(
        name=name,
        model_path="/nowhere",
        served_name="m",
        socket_path="",
        # Nobody listens there, of which it complains at once.
        join=("tcp:127.0.0.1:9",),
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "twinfire.worker", encode_worker_config(config)],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
    finally:
        process.kill()
        process.communicate()
    said = line.split(" ", 2)[2]
    assert said.startswith(beginning), line
    assert "no link to the gateway tcp:127.0.0.1:9" in line
