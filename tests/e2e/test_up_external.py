"""`twinfire up` before engines of other kinds: what clients, operators and dashboards see."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from support.engine_thread import EngineThread, engine_thread
from support.mock_vllm import WORDS
from support.serve_process import ServeProcess, up_process

CLUSTER = """
[gateway]
admin_key_file = "{admin_key}"
[[model]]
names = ["pair", "pair-too"]
[model.external]
engine = "vllm"
engine_model = "engine-model"
api_key_file = "{engine_key}"
prefill = ["{0}"]
decode = ["{1}"]
[[model]]
names = ["plain"]
[model.external]
engine = "vllm"
engine_model = "engine-model"
mixed = ["{2}", "{3}"]
health_interval_s = 0.05
[[model]]
names = ["rooms"]
[model.external]
engine = "sglang"
engine_model = "engine-model"
prefill = ["{prefill}"]
decode = ["{decode}"]
bootstrap_ports = [9001]
"""
TEXT = "".join(WORDS)
ADMIN_KEY = "let-me-in"


@pytest.fixture(scope="module")
def engines() -> Iterator[EngineThread]:
    with engine_thread(4) as running:
        yield running


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, engines: EngineThread
) -> Iterator[ServeProcess]:
    folder = tmp_path_factory.mktemp("external")
    (folder / "admin").write_text(ADMIN_KEY + "\n")
    (folder / "engine").write_text("ours\n")
    text = CLUSTER.format(
        *(one.url for one in engines.vllm),
        admin_key=folder / "admin",
        engine_key=folder / "engine",
        prefill=engines.sglang[0].url,
        decode=engines.sglang[1].url,
    )
    (folder / "cluster.toml").write_text(text)
    with up_process(folder, str(folder / "cluster.toml")) as running:
        yield running
    assert running.process.returncode == 0, running.output()


def client_of(cluster: ServeProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="a-client's", max_retries=0)


def ask(cluster: ServeProcess, model: str) -> Any:
    messages: Any = [{"role": "user", "content": "Was brennt? " * 20}]
    return client_of(cluster).chat.completions.create(model=model, messages=messages, max_tokens=6)


def run_command(cluster: ServeProcess, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "twinfire.cli.main", *words, "--url", cluster.url],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def admin_key_file(cluster: ServeProcess) -> str:
    return str(cluster.log.parent / "admin")


def wait_for_state(cluster: ServeProcess, url: str, state: str) -> None:
    deadline_s = time.monotonic() + 20
    words = ("status", "--json", "--admin-key-file", admin_key_file(cluster))
    while True:
        status = json.loads(run_command(cluster, *words).stdout)
        if {one["url"]: one["state"] for one in status["engines"]}[url] == state:
            return
        assert time.monotonic() < deadline_s, status
        time.sleep(0.05)


@pytest.mark.parametrize("model", ["pair", "pair-too", "plain", "rooms"])
def test_answers_and_streams_come_from_the_engines(cluster: ServeProcess, model: str) -> None:
    answer = ask(cluster, model)
    assert (answer.model, answer.choices[0].message.content) == (model, TEXT)
    assert answer.usage.completion_tokens == 6
    messages: Any = [{"role": "user", "content": "Was brennt? " * 20}]
    pieces = list(
        client_of(cluster).chat.completions.create(
            model=model, messages=messages, max_tokens=6, stream=True
        )
    )
    assert "".join(one.choices[0].delta.content or "" for one in pieces if one.choices) == TEXT


def test_prompts_of_a_pair_are_handed_over(cluster: ServeProcess, engines: EngineThread) -> None:
    before = engines.vllm[1].num_pulled
    ask(cluster, "pair")
    assert engines.vllm[1].num_pulled == before + 1
    assert engines.fabric.num_held == 0
    assert engines.vllm[1].headers[-1]["authorization"] == "Bearer ours"
    # Where no key is given none is sent, least of all the client's.
    ask(cluster, "plain")
    plain = engines.vllm[2].headers + engines.vllm[3].headers
    assert not any("authorization" in headers for headers in plain)


def test_models_health_and_unserved_paths_tell_of_them(cluster: ServeProcess) -> None:
    models = client_of(cluster).models.list().data
    assert [model.id for model in models] == ["pair", "pair-too", "plain", "rooms"]
    assert client_of(cluster).models.retrieve("pair-too").id == "pair-too"
    code, body = cluster.get("/health")
    assert code == 200
    assert set(json.loads(body)["models"]) == {"pair", "plain", "rooms"}
    with pytest.raises(openai.NotFoundError):
        ask(cluster, "nobody")
    request = urllib.request.Request(
        cluster.url + "/tokenize",
        json.dumps({"model": "pair", "prompt": "x"}).encode(),
        {"content-type": "application/json"},
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=10)
    assert caught.value.code == 400
    assert json.load(caught.value)["error"]["code"] == "external_model"


def test_status_and_metrics_follow_the_engines(
    cluster: ServeProcess, engines: EngineThread
) -> None:
    refused = run_command(cluster, "status")
    assert refused.returncode == 1
    assert "key is missing or wrong" in refused.stderr
    shown = run_command(cluster, "status", "--admin-key-file", admin_key_file(cluster)).stdout
    rows = {line.split()[0]: line.split() for line in shown.splitlines()}
    assert rows[engines.vllm[0].url][1:4] == ["vllm", "prefill", "pair"]
    assert rows[engines.sglang[1].url][1:4] == ["sglang", "decode", "rooms"]
    assert "worker" not in rows
    first, second = engines.vllm[2:]
    engines.call(lambda: setattr(first, "healthy", False))
    wait_for_state(cluster, first.url, "unhealthy")
    # One of two is enough.
    assert cluster.get("/health")[0] == 200
    ask(cluster, "plain")
    engines.call(lambda: setattr(second, "healthy", False))
    wait_for_state(cluster, second.url, "unhealthy")
    code, body = cluster.get("/health")
    assert (code, b"plain: no engine is healthy" in body) == (503, True), body
    text = cluster.get("/metrics")[1].decode()
    labels = f'engine="{first.url}",model_name="plain",stage="mixed"'
    assert f"twinfire:external_engine_healthy{{{labels}}} 0.0" in text
    engines.call(lambda: [setattr(one, "healthy", True) for one in (first, second)])
    wait_for_state(cluster, first.url, "ready")
    wait_for_state(cluster, second.url, "ready")


def test_an_engine_that_breaks_requests_is_paused_and_counted(
    cluster: ServeProcess, engines: EngineThread
) -> None:
    broken = engines.vllm[3]
    engines.call(lambda: setattr(broken, "fail_status", 500))
    deadline_s = time.monotonic() + 30
    while f'engine="{broken.url}"' not in _breaker_lines(cluster, "1.0"):
        # Each is answered by the other engine.
        assert ask(cluster, "plain").choices[0].message.content == TEXT
        assert time.monotonic() < deadline_s
    text = cluster.get("/metrics")[1].decode()
    labels = f'engine="{broken.url}",model_name="plain",reason="broken",stage="mixed"'
    assert f"twinfire:external_engine_failures_total{{{labels}}} 3.0" in text
    assert re.search(r'external_retries_total{model_name="plain"} \d', text)
    count = re.search(r'e2e_request_latency_seconds_count{model_name="plain"} (\S+)', text)
    assert count is not None
    assert float(count.group(1)) >= 3
    wait_for_state(cluster, broken.url, "paused")
    engines.call(lambda: setattr(broken, "fail_status", None))
    while _breaker_lines(cluster, "1.0"):
        ask(cluster, "plain")
        assert time.monotonic() < deadline_s


def _breaker_lines(cluster: ServeProcess, value: str) -> str:
    text = cluster.get("/metrics")[1].decode()
    lines = re.findall(r"^twinfire:external_engine_breaker_open{.*$", text, re.MULTILINE)
    return "\n".join(line for line in lines if line.endswith(" " + value))


def test_a_stanza_that_cannot_work_ends_the_command_with_a_reason(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(
        '[model]\nnames = ["m"]\n'
        'external = { engine = "vllm", mixed = ["http://x"], api_key_file = "/nowhere/key" }'
    )
    done = subprocess.run(
        [sys.executable, "-m", "twinfire.cli.main", "up", str(file), "--port", "0"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "cannot read the engines' key /nowhere/key" in done.stderr
