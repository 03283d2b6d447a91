"""`twinfire up` with drafts says to the bit what `twinfire serve` without drafts says."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.default_head_folder import write_default_head
from support.serve_process import ServeProcess, serve_process, up_process

pytestmark = pytest.mark.slow

CLUSTER = """
[gateway]
pd_policy = "always"
[model]
max_model_len = 2048
connector = "{connector}"
speculate = "{speculate}"
prefill = {{ count = 1, threads = 1, kv_cache_memory = 200_000_000 }}
decode = {{ count = 1, threads = 1, kv_cache_memory = 200_000_000 }}
"""
LIST = "Repeat these words three times: red, green, blue, red, green, blue."
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
BODIES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8},
    "choices": {"temperature": 0.8, "n": 2},
    "penalties": {"temperature": 0, "frequency_penalty": 0.8, "presence_penalty": 0.3},
    "stop": {"temperature": 0, "stop": ["green, blue", "blue, red, green"]},
    "grammar": {
        "temperature": 0.8,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": SCHEMA, "strict": True},
        },
    },
}


def chat(server: ServeProcess, messages: list[dict[str, str]], **fields: Any) -> dict[str, Any]:
    """Return all of a stream: by choice its text, log-probabilities and finish; and the usage."""
    body = {
        "messages": messages,
        "max_tokens": 64,
        "seed": 7,
        "logprobs": True,
        "top_logprobs": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    choices: dict[int, dict[str, Any]] = {}
    for event in events(server, body):
        for part in event["choices"]:
            choice = choices.setdefault(part["index"], {"text": "", "logprobs": []})
            choice["text"] += part["delta"].get("content") or ""
            if part["logprobs"] is not None:
                choice["logprobs"] += part["logprobs"]["content"]
            if part["finish_reason"] is not None:
                choice["finish"] = part["finish_reason"], part["stop_reason"]
    usage = {key: event["usage"][key] for key in ("prompt_tokens", "completion_tokens")}
    return {"choices": choices, "usage": usage}


def events(server: ServeProcess, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    request = urllib.request.Request(
        server.url + "/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                yield event


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_default_head(tmp_path_factory.mktemp("head"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    options = ("--kv-cache-memory", "200MiB", "--max-model-len", "2048")
    with serve_process(tmp_path_factory.mktemp("serve"), *options) as running:
        yield running


@pytest.fixture(
    scope="module",
    params=[
        ("suffix:adaptive=false", "socket"),
        ("hybrid:adaptive=false,head={head}", "socket"),
        ("eagle3:adaptive=false,head={head}", "nixl"),
    ],
    ids=["suffix", "hybrid", "eagle3-nixl"],
)
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, head: Path
) -> Iterator[ServeProcess]:
    speculate, connector = request.param
    if connector == "nixl" and importlib.util.find_spec("nixl_cu12") is None:
        pytest.skip("NIXL is not installed (extra `nixl`)")
    folder = tmp_path_factory.mktemp("up")
    speculate = speculate.format(head=head)
    text = CLUSTER.format(speculate=speculate, connector=connector)
    (folder / "cluster.toml").write_text(text)
    with up_process(folder, str(folder / "cluster.toml")) as running:
        wait_for_workers(running)
        yield running


def workers(cluster: ServeProcess) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(cluster.get("/cluster/status")[1])["workers"]
    return found


def wait_for_workers(cluster: ServeProcess) -> None:
    deadline_s = time.monotonic() + 60
    while len(workers(cluster)) != 2:
        assert time.monotonic() < deadline_s, cluster.output()
        time.sleep(0.05)


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_chats_are_the_same(
    cluster: ServeProcess, plain: ServeProcess, body: dict[str, Any]
) -> None:
    messages = [{"role": "user", "content": LIST}]
    expected = chat(plain, messages, **body)
    assert chat(cluster, messages, **body) == expected
    # Once more with the prompt's blocks cached and its output learnt, then a second turn.
    assert chat(cluster, messages, **body) == expected
    answer = {"role": "assistant", "content": expected["choices"][0]["text"]}
    messages += [answer, {"role": "user", "content": "Once more, please."}]
    assert chat(cluster, messages, **body) == chat(plain, messages, **body)


def test_a_drafting_worker_killed_in_the_middle_changes_no_stream(
    cluster: ServeProcess, plain: ServeProcess
) -> None:
    messages = [{"role": "user", "content": LIST + " And tell of the sea. " * 20}]
    body = {"messages": messages, "max_tokens": 200, "seed": 5, "temperature": 0.8}
    body |= {"ignore_eos": True, "stream": True}
    expected = "".join(text_of(event) for event in events(plain, body))
    decode = next(one for one in workers(cluster) if one["role"] == "decode")
    assert sum(decode["drafted"]) > 0
    pieces: list[str] = []
    for event in events(cluster, body):
        pieces.append(text_of(event))
        if len(pieces) == 25:
            os.kill(decode["pid"], signal.SIGKILL)
    assert "".join(pieces) == expected
    wait_for_workers(cluster)


def text_of(event: dict[str, Any]) -> str:
    choices = event["choices"]
    return (choices[0]["delta"].get("content") or "") if choices else ""
