"""Clients of Workers AI and the default model behind `twinfire serve`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from support.serve_process import ServeProcess, serve_process

KIMI = "@cf/kimi/k2.5"
TOKEN = "any"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    options = ("--alias", f"{KIMI}=smollm2-135m", "--max-num-seqs", "1", "--max-model-len", "448")
    folder = tmp_path_factory.mktemp("serve")
    with serve_process(folder, *options, "--kv-cache-memory", "256MiB") as running:
        yield running


def run_url(server: ServeProcess) -> str:
    return server.url + "/client/v4/accounts/{account_id}/ai/run/" + KIMI


def test_an_agent_loop_sees_its_cache(server: ServeProcess) -> None:
    large_system_prompt = "You answer with one word and never explain anything. " * 24
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    first = httpx.post(
        run_url(server),
        timeout=60,
        headers=headers,
        json={
            "messages": [
                {"role": "system", "content": large_system_prompt},
                {"role": "user", "content": "첫 번째 질문"},
            ]
        },
    )
    assert first.status_code == 200, first.text
    assert isinstance(first.json()["result"]["response"], str)
    session_id = first.headers.get("cf-session-affinity")
    follow_up = httpx.post(
        run_url(server),
        timeout=60,
        headers={**headers, "x-session-affinity": session_id},
        json={
            "messages": [
                {"role": "system", "content": large_system_prompt},
                {"role": "user", "content": "And then?"},
            ]
        },
    )
    usage = follow_up.json()["result"]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 200
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_a_busy_worker_is_told_to_whoever_will_not_wait(server: ServeProcess) -> None:
    body: dict[str, Any] = {"prompt": "Count from one to a hundred.", "stream": True}
    with httpx.stream("POST", run_url(server), json=body, timeout=30) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        started_s = time.monotonic()
        refused = httpx.post(
            run_url(server), json={"prompt": "hi", "options": {"rejectIfBusy": True}}
        )
        assert time.monotonic() - started_s < 2
        assert refused.status_code == 429
        assert refused.json()["errors"][0]["code"] == 3040
        assert int(refused.headers["retry-after"]) >= 1
    # The stream was left, so there is room again.
    deadline_s = time.monotonic() + 10
    while (
        httpx.post(
            run_url(server),
            json={"prompt": "hi", "max_tokens": 1, "options": {"rejectIfBusy": True}},
        ).status_code
        == 429
    ):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_a_batch_of_the_real_model(server: ServeProcess) -> None:
    url = run_url(server) + "?queueRequest=true"
    requests = [{"prompt": f"Say {word}", "max_tokens": 4} for word in ("one", "two")]
    ticket = httpx.post(url, json={"requests": requests}).json()["result"]
    deadline_s = time.monotonic() + 20
    while True:
        result = httpx.post(url, json={"request_id": ticket["request_id"]}).json()["result"]
        if "responses" in result:
            break
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    assert [response["success"] for response in result["responses"]] == [True, True]
    assert 2 <= result["usage"]["completion_tokens"] <= 8


def test_json_that_follows_a_bare_schema(server: ServeProcess) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Describe a person as JSON."}],
        "response_format": {"type": "json_schema", "json_schema": schema},
        "max_tokens": 64,
        "temperature": 0,
    }
    result = httpx.post(run_url(server), json=body, timeout=30).json()["result"]
    assert set(result["response"]) == {"name", "age"}
    text = result["choices"][0]["message"]["content"]
    assert json.loads(text) == result["response"]
