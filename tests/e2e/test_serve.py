"""The default model behind `twinfire serve`, asked by the real openai client over a real socket."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

from support.serve_process import ServeProcess, serve_process

MODEL = "smollm2-135m"
LONG_SYSTEM = "You answer in few words. " * 40


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    folder = tmp_path_factory.mktemp("serve")
    with serve_process(folder, "--kv-cache-memory", "512MiB") as running:
        yield running
    assert running.process.returncode == 0, running.output()


@pytest.fixture
def client(server: ServeProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def until(condition: Callable[[], bool], limit_s: float) -> float:
    """Poll until `condition` holds and return how long that took."""
    started_s = time.monotonic()
    while not condition():
        assert time.monotonic() - started_s < limit_s, f"not so within {limit_s} s"
        time.sleep(0.01)
    return time.monotonic() - started_s


def test_the_model_answers_sense(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model=MODEL, messages=ask("What is 2+2? Answer with a number."), temperature=0
    )
    assert "4" in (chat.choices[0].message.content or "")
    assert chat.choices[0].finish_reason == "stop"
    plain = client.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=3, temperature=0
    )
    assert "Paris" in plain.choices[0].text


def test_streams_say_what_whole_answers_say(client: openai.OpenAI) -> None:
    common = {"model": MODEL, "max_tokens": 24, "seed": 11, "temperature": 0.8}
    whole = client.chat.completions.create(messages=ask("Name a colour."), **common)
    chunks = list(
        client.chat.completions.create(
            messages=ask("Name a colour."),
            stream=True,
            stream_options={"include_usage": True},
            **common,
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens_details is not None
    plain = client.completions.create(prompt="Once upon", **common).choices[0].text
    pieces = client.completions.create(prompt="Once upon", stream=True, **common)
    assert "".join(p.choices[0].text for p in pieces) == plain


def test_seeds_and_choices(client: openai.OpenAI) -> None:
    def three(seed: int) -> list[str | None]:
        answer = client.chat.completions.create(
            model=MODEL, messages=ask("Tell a story."), n=3, seed=seed, max_tokens=12
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.message.content for choice in answer.choices]

    first = three(1)
    assert len(set(first)) > 1
    assert three(1) == first
    assert three(2) != first


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=ask("Hi"), max_tokens=5, logprobs=True, top_logprobs=3, temperature=0
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert len(content) == answer.usage.completion_tokens
    for token in content:
        assert token.logprob <= 0
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token, "greedy takes the most likely"


def test_echoed_logprobs_score_the_prompt(client: openai.OpenAI) -> None:
    scored = client.completions.create(
        model=MODEL, prompt="The sky is blue", max_tokens=0, echo=True, logprobs=1
    )
    logprobs = scored.choices[0].logprobs
    assert scored.choices[0].text == "The sky is blue"
    assert logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in logprobs.token_logprobs[1:])
    assert "".join(logprobs.tokens) == "The sky is blue"


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    prompt = "Count: one, two, three,"
    common = {"model": MODEL, "prompt": prompt, "max_tokens": 16, "temperature": 0}
    free = client.completions.create(**common).choices[0].text
    stop = free[3:8]
    stopped = client.completions.create(stop=stop, **common).choices[0]
    assert stopped.text == free[: free.index(stop)]
    assert stopped.finish_reason == "stop"


def test_a_prompt_seen_before_is_cached_in_whole_blocks(client: openai.OpenAI) -> None:
    def cached() -> tuple[int, int]:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "system", "content": LONG_SYSTEM}, *ask("Hello")],
            max_tokens=2,
        )
        details = answer.usage.prompt_tokens_details
        return answer.usage.prompt_tokens, details.cached_tokens

    prompt_tokens, first = cached()
    assert first == 0
    assert cached() == (prompt_tokens, (prompt_tokens - 1) // 32 * 32)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks_within_a_second(
    server: ServeProcess, stream: bool
) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    body = (
        f'{{"model": "{MODEL}", "prompt": "Once", "max_tokens": 4000, "ignore_eos": true, '
        f'"stream": {str(stream).lower()}}}'
    )
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection((host, int(port))) as link:
        link.sendall((head + "Content-Type: application/json\r\n\r\n" + body).encode())
        until(lambda: server.metric("num_requests_running") == 1, 10)
    until(
        lambda: (
            server.metric("num_requests_running") == 0 and server.metric("kv_cache_usage_perc") == 0
        ),
        1.0 + 1.0,  # A second for the server, one for the polling on a busy machine.
    )


def test_too_long_prompts_are_400_in_both_modes(client: openai.OpenAI) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="8192"):
            client.completions.create(model=MODEL, prompt="word " * 9000, stream=stream)


def test_a_killed_worker_is_replaced_and_clients_are_told(
    server: ServeProcess, client: openai.OpenAI
) -> None:
    stream = client.completions.create(
        model=MODEL, prompt="Once", max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    (worker,) = server.worker_pids()
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(openai.APIError):
        for _ in stream:
            pass
    status, body = server.get("/health")
    assert status == 503
    assert b"restarting" in body or b"worker" in body
    server.wait_until_ready()
    assert server.worker_pids() != [worker]
    answer = client.completions.create(model=MODEL, prompt="Hello", max_tokens=2)
    assert answer.usage.completion_tokens == 2


def test_health_tells_the_reason_before_it_is_ready(tmp_path: Path) -> None:
    with serve_process(tmp_path, ready=False) as starting:

        def answers() -> bool:
            try:
                return starting.get("/health")[0] == 503
            except OSError:
                return False

        until(answers, 30)
        assert b"loading" in starting.get("/health")[1]
        starting.wait_until_ready()


def test_sigterm_lets_a_stream_finish(tmp_path: Path) -> None:
    with (
        serve_process(tmp_path, "--kv-cache-memory", "512MiB") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        stream = client.completions.create(
            model=MODEL, prompt="Once", max_tokens=60, stream=True, extra_body={"ignore_eos": True}
        )
        chunks = iter(stream)
        next(chunks)
        (worker,) = server.worker_pids()
        server.process.send_signal(signal.SIGTERM)
        until(lambda: server.get("/health")[0] == 503, 10)
        with pytest.raises(openai.InternalServerError, match="shutting down"):
            client.completions.create(model=MODEL, prompt="Late", max_tokens=1)
        *_, last = chunks
        assert last.choices[0].finish_reason == "length"
        assert server.process.wait(30) == 0
        until(lambda: not Path(f"/proc/{worker}").exists(), 5)
