"""A worker that dies again and again, and an end asked for while answers are on their way."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from support.serve_process import ServeProcess, up_process
from support.tiny_text_model import write_text_model

CLUSTER = """
[model]
model = "{model}"
prefill = {{ count = 1, threads = 1, kv_cache_memory = 16_000_000 }}
decode = {{ count = 1, threads = 1, kv_cache_memory = 16_000_000 }}
"""
LIMIT_S = 60.0


@pytest.fixture
def cluster_file(tmp_path: Path) -> str:
    write_text_model(tmp_path / "tiny")
    (tmp_path / "cluster.toml").write_text(CLUSTER.format(model=tmp_path / "tiny"))
    return str(tmp_path / "cluster.toml")


def status(cluster: ServeProcess) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(cluster.get("/cluster/status")[1])
    return answer


def wait_for(cluster: ServeProcess, num_workers: int, absent: str | None) -> dict[str, Any]:
    """Wait for so many workers, and for the other one to be in the state `absent`."""
    deadline_s = time.monotonic() + LIMIT_S
    while True:
        now = status(cluster)
        states = [one["state"] for one in now["absent"]]
        if len(now["workers"]) == num_workers and states == ([absent] if absent else []):
            return now
        assert time.monotonic() < deadline_s, f"{now}\n{cluster.output()}"
        time.sleep(0.02)


def test_the_pauses_of_a_crash_loop_grow_and_status_tells(
    tmp_path: Path, cluster_file: str
) -> None:
    with up_process(tmp_path, cluster_file) as cluster:
        for number in range(3):
            now = wait_for(cluster, 2, None)
            decode = next(one for one in now["workers"] if one["role"] == "decode")
            assert (decode["name"], decode["restarts"]) == ("decode-0", number)
            os.kill(decode["pid"], signal.SIGKILL)
            (absent,) = wait_for(cluster, 1, "restarting")["absent"]
            assert (absent["name"], absent["role"]) == ("decode-0", "decode")
            assert absent["reason"] == f"the last one exited with status -{signal.SIGKILL.value}"
            assert absent["next_start_in_s"] <= 0.5 * 2**number
        shown = subprocess.run(
            [sys.executable, "-m", "twinfire.cli.main", "status", "--url", cluster.url],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        assert re.search(r"^decode-0 .*(re)?starting.* \(\d restarts\)", shown, re.MULTILINE), shown
        wait_for(cluster, 2, None)
        log = cluster.output()
    pauses = re.findall(r"decode-0 exited with status -9; starting again in (\S+) s", log)
    assert pauses == ["0.5", "1.0", "2.0"]
    assert re.search(r"worker decode-0 \(\w+\) left tiny", log)
    assert re.search(r"worker prefill-0 \(\w+\) joined tiny as prefill", log)


@pytest.mark.parametrize("reaches_workers", [False, True], ids=["gateway", "whole-group"])
def test_an_end_asked_for_in_the_middle_of_a_stream_waits_for_it(
    tmp_path: Path, cluster_file: str, reaches_workers: bool
) -> None:
    body = {"model": "tiny", "prompt": "x" * 64, "max_tokens": 1500, "n": 8, "seed": 1}
    body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    with up_process(tmp_path, cluster_file) as cluster:
        pids = [one["pid"] for one in wait_for(cluster, 2, None)["workers"]]
        request = urllib.request.Request(
            cluster.url + "/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            head = answer.readline()
            assert head.startswith(b"data: {"), head
            cluster.process.send_signal(signal.SIGTERM)
            # As a service manager does, which signals every process of a service.
            for pid in pids if reaches_workers else ():
                os.kill(pid, signal.SIGTERM)
            deadline_s = time.monotonic() + LIMIT_S
            while cluster.get("/health")[0] != 503:
                assert time.monotonic() < deadline_s
            assert cluster.process.poll() is None
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(request, timeout=LIMIT_S)
            assert caught.value.code == 503
            rest = answer.read()
        assert cluster.process.wait(LIMIT_S) == 0, cluster.output()
    assert rest.endswith(b"data: [DONE]\n\n"), rest[-500:]
    events = [json.loads(line[6:]) for line in rest.splitlines() if line.startswith(b"data: {")]
    assert not any("error" in event for event in events)
    assert events[-1]["usage"]["completion_tokens"] == 8 * 1500
