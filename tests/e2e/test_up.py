"""The default model behind `twinfire up`: two workers, one stream, whatever is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from support.default_model import default_model_path
from support.real_prompts import real_texts
from support.serve_process import ServeProcess, serve_process, up_process

MODEL = "smollm2-135m"
CLUSTER = """
[gateway]
pd_policy = "always"
[model]
max_model_len = 4096
prefill = { count = 1, threads = 1, kv_cache_memory = 300_000_000 }
decode = { count = 1, threads = 1, kv_cache_memory = 300_000_000 }
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    folder = tmp_path_factory.mktemp("up")
    (folder / "cluster.toml").write_text(CLUSTER)
    with up_process(folder, str(folder / "cluster.toml")) as running:
        wait_for_workers(running, 2)
        yield running
    assert running.process.returncode == 0, running.output()


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    options = ("--kv-cache-memory", "512MiB", "--max-model-len", "4096")
    with serve_process(tmp_path_factory.mktemp("serve"), *options) as running:
        yield running


def status(cluster: ServeProcess) -> dict[str, Any]:
    code, body = cluster.get("/cluster/status")
    assert code == 200, body
    answer: dict[str, Any] = json.loads(body)
    return answer


def wait_for_workers(cluster: ServeProcess, count: int, limit_s: float = 40.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while len([w for w in status(cluster)["workers"] if not w["draining"]]) != count:
        assert time.monotonic() < deadline_s, cluster.output()
        time.sleep(0.05)


def wait_until_nothing_is_held(cluster: ServeProcess, limit_s: float = 5.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while any(worker["kv_blocks_used"] for worker in status(cluster)["workers"]):
        assert time.monotonic() < deadline_s, status(cluster)
        time.sleep(0.02)


def post(server: ServeProcess, path: str, body: dict[str, object]) -> dict[str, Any]:
    request = urllib.request.Request(
        server.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        parsed: dict[str, Any] = json.load(answer)
        return parsed


def command(cluster: ServeProcess, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "twinfire.cli.main", *words, "--url", cluster.url],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "Hi", "max_tokens": 12},
        {"prompt": "word " * 31, "max_tokens": 20, "n": 3, "seed": 7, "logprobs": 2},
        {"prompt": "word " * 200, "max_tokens": 8, "echo": True, "logprobs": 1},
        {"prompt": "The sea is " * 40, "max_tokens": 1, "temperature": 0},
        {"prompt": ["One two", "Three four five " * 30], "max_tokens": 10, "seed": 3},
        {"prompt": "Count: 1 2 3", "max_tokens": 40, "stop": ["7", "\n"], "temperature": 0},
        {"prompt": "Long " * 900, "max_tokens": 16, "temperature": 0.7, "seed": 11},
    ],
    ids=["short", "choices", "echo", "one-token", "prompts", "stop", "long"],
)
def test_two_workers_answer_as_one(
    cluster: ServeProcess, mixed: ServeProcess, body: dict[str, object]
) -> None:
    body = {"model": MODEL, "seed": 1, **body}
    answers = [post(server, "/v1/completions", body) for server in (cluster, mixed)]
    assert answers[0]["choices"] == answers[1]["choices"]
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answers[0]["usage"][key] == answers[1]["usage"][key]
    wait_until_nothing_is_held(cluster)


@pytest.mark.slow
def test_two_workers_answer_as_one_on_200_prompts(
    cluster: ServeProcess, mixed: ServeProcess
) -> None:
    for index, text in enumerate(real_texts(200)):
        body: dict[str, object] = {
            "model": MODEL,
            "prompt": text,
            "max_tokens": 128,
            "seed": index,
            "temperature": 0.0 if index % 2 else 0.8,
            "logprobs": 1,
        }
        answers = [post(server, "/v1/completions", body) for server in (cluster, mixed)]
        assert answers[0]["choices"] == answers[1]["choices"], f"prompt {index}"
    wait_until_nothing_is_held(cluster)


def test_an_agent_keeps_its_cache_by_the_session_that_came_back(cluster: ServeProcess) -> None:
    client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)
    messages: list[Any] = [{"role": "system", "content": "You are brief. " * 60}]
    session, cached = "", []
    for question in ("What is a cat?", "And a dog?", "Which is bigger?"):
        messages.append({"role": "user", "content": question})
        answer = client.chat.completions.with_raw_response.create(
            model=MODEL,
            messages=messages,
            max_tokens=24,
            temperature=0,
            extra_headers={"x-session-affinity": session} if session else {},
        )
        came_back = answer.headers["cf-session-affinity"]
        assert session in ("", came_back)
        session = came_back
        chat = answer.parse()
        messages.append({"role": "assistant", "content": chat.choices[0].message.content})
        assert chat.usage is not None
        assert chat.usage.prompt_tokens_details is not None
        cached.append(chat.usage.prompt_tokens_details.cached_tokens or 0)
    assert cached[0] == 0
    assert cached == sorted(set(cached)), f"cached tokens did not grow: {cached}"


@pytest.mark.parametrize("at_token", [0, 20])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_killed_in_the_middle_changes_no_stream(
    cluster: ServeProcess, mixed: ServeProcess, role: str, at_token: int
) -> None:
    body: dict[str, Any] = {
        "model": MODEL,
        # Long enough that the prompt is still being computed when a worker is killed at once.
        "prompt": f"{role} {at_token}: tell me of the sea. " * 150,
        "max_tokens": 120,
        "temperature": 0.8,
        "seed": 5,
        "ignore_eos": True,
    }
    expected = post(mixed, "/v1/completions", body)["choices"][0]["text"]
    pid = next(w["pid"] for w in status(cluster)["workers"] if w["role"] == role)
    killer = threading.Timer(0.15, os.kill, (pid, signal.SIGKILL))
    if at_token == 0:
        killer.start()
    request = urllib.request.Request(
        cluster.url + "/v1/completions",
        json.dumps({**body, "stream": True}).encode(),
        {"content-type": "application/json"},
    )
    pieces: list[str] = []
    with urllib.request.urlopen(request, timeout=60) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            pieces.append(json.loads(line[6:])["choices"][0]["text"])
            if len(pieces) == at_token:
                os.kill(pid, signal.SIGKILL)
    assert "".join(pieces) == expected
    killer.cancel()
    wait_for_workers(cluster, 2)
    wait_until_nothing_is_held(cluster)


def test_roles_counts_and_drain_change_while_it_serves(cluster: ServeProcess) -> None:
    assert "decode-0" in command(cluster, "status")
    command(cluster, "scale", "prefill=2")
    wait_for_workers(cluster, 3)
    names = [w["name"] for w in status(cluster)["workers"] if w["role"] == "prefill"]
    shown = command(cluster, "role", names[-1], "decode")
    assert shown.count(" decode ") == 2
    command(cluster, "drain", names[-1])
    wait_for_workers(cluster, 2)
    command(cluster, "scale", "prefill=1", "decode=1")
    wait_for_workers(cluster, 2)
    answer = post(cluster, "/v1/completions", {"model": MODEL, "prompt": "Hi", "max_tokens": 4})
    assert answer["usage"]["completion_tokens"] == 4


def test_headers_tell_the_route_and_bound_the_time(cluster: ServeProcess) -> None:
    client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)
    prompt = "A route through two workers. " * 30
    answer = client.completions.with_raw_response.create(
        model=MODEL, prompt=prompt, max_tokens=2, extra_headers={"twinfire-route": "1"}
    )
    workers = {worker["instance_id"]: worker["role"] for worker in status(cluster)["workers"]}
    assert workers[answer.headers["twinfire-route-prefill"]] == "prefill"
    assert workers[answer.headers["twinfire-route-decode"]] == "decode"
    assert answer.headers["twinfire-route-reason"] == "always"
    assert answer.headers["twinfire-route-attempts"] == "1"
    assert (
        "twinfire-route-reason"
        not in client.completions.with_raw_response.create(
            model=MODEL, prompt=prompt, max_tokens=2
        ).headers
    )
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(
            model=MODEL,
            prompt=prompt * 15,
            max_tokens=900,
            extra_headers={"x-request-timeout-ms": "300"},
        )
    assert caught.value.status_code == 504
    with pytest.raises(openai.BadRequestError, match="x-request-timeout-ms"):
        client.completions.create(
            model=MODEL, prompt=prompt, extra_headers={"x-request-timeout-ms": "soon"}
        )
    wait_until_nothing_is_held(cluster)


def samples(cluster: ServeProcess, name: str) -> dict[str, float]:
    """The values of a metric by their labels."""
    found = re.findall(
        rf"^twinfire:{name}{{([^}}]*)}} (\S+)$", cluster.get("/metrics")[1].decode(), re.MULTILINE
    )
    return {labels: float(value) for labels, value in found}


def test_metrics_tell_where_the_time_to_the_first_token_went(cluster: ServeProcess) -> None:
    moved = sum(samples(cluster, "transfer_bytes_total").values())
    body: dict[str, object] = {"model": MODEL, "prompt": "metrics " * 300, "max_tokens": 3}
    for _ in range(3):
        post(cluster, "/v1/completions", body)
    parts = samples(cluster, "time_to_first_token_part_seconds_sum")
    (total,) = samples(cluster, "time_to_first_token_seconds_sum").values()
    assert len(parts) == 8
    assert min(parts.values()) > -0.001
    assert sum(parts.values()) == pytest.approx(total, rel=1e-6)
    assert sum(samples(cluster, "transfer_bytes_total").values()) > moved
    decisions = samples(cluster, "route_decisions_total")
    assert any('reason="always"' in labels for labels in decisions)
    wait_until_nothing_is_held(cluster)
    held = samples(cluster, "worker_kv_blocks_used")
    assert len(held) == len(status(cluster)["workers"])
    for name in ("ledger_prefill_tokens", "ledger_kv_blocks", "worker_prefill_tokens_waiting"):
        assert set(samples(cluster, name)) == set(held)
        assert set(samples(cluster, name).values()) == {0.0}, name


def test_what_cannot_be_done_is_told(cluster: ServeProcess) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "twinfire.cli.main", "drain", "nobody", "--url", cluster.url],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "`nobody` names 0 workers; there are: " in done.stderr


TWO_MODELS = """
[[model]]
model = "smollm2-135m"
max_model_len = 2048
prefill = {{ count = 0 }}
decode = {{ count = 0 }}
mixed = {{ count = 1, threads = 1, kv_cache_memory = 100_000_000 }}
[[model]]
model = "{other}"
names = ["org/other"]
max_model_len = 2048
prefill = {{ count = 1, threads = 1, kv_cache_memory = 100_000_000 }}
decode = {{ count = 1, threads = 1, kv_cache_memory = 100_000_000 }}
"""


def test_two_models_have_pools_of_their_own(tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.symlink_to(default_model_path())
    (tmp_path / "cluster.toml").write_text(TWO_MODELS.format(other=other))
    with up_process(tmp_path, str(tmp_path / "cluster.toml")) as both:
        wait_for_workers(both, 3)
        body: dict[str, object] = {"prompt": "The sea is", "max_tokens": 6, "temperature": 0}
        answers = [
            post(both, "/v1/completions", {**body, "model": name}) for name in (MODEL, "org/other")
        ]
        assert [answer["model"] for answer in answers] == [MODEL, "org/other"]
        assert answers[0]["choices"] == answers[1]["choices"]
        names = [worker["name"] for worker in status(both)["workers"]]
        assert names == ["org-other.decode-0", "org-other.prefill-0", f"{MODEL}.mixed-0"]
        command(both, "scale", "mixed=2", "--model", MODEL)
        command(both, "scale", "mixed=1", "--model", MODEL)
        # The one that was still loading is the one that went.
        assert f"{MODEL}.mixed-0" in command(both, "status")
        assert both.get("/health")[0] == 200
