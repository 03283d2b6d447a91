"""What a server tells of itself: models, health, keys, metrics, and how it stops."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import threading

import pytest
from openai import OpenAI

from support.gateway_server import ALIAS, MODEL, RunningGateway, byte_text_side, running_gateway
from support.raw_http import Answer, open_post, read_until, request
from support.scripted_backend import ScriptedBackend, say, worker_info
from twinfire import __version__
from twinfire.gateway.app import create_app, create_app_of_models
from twinfire.gateway.gateway import Gateway
from twinfire.gateway.hosted_model import HostedModel, HostedModels
from twinfire.gateway.listening import AddressUnavailable, bind_socket
from twinfire.gateway.metrics import Metrics
from twinfire.gateway.served_model import ServedModel
from twinfire.gateway.server import GatewayServer
from twinfire.gateway.settings import GatewaySettings
from twinfire.protocol.errors import InvalidRequest, Overloaded
from twinfire.protocol.messages import Load

CHAT = "/v1/chat/completions"
BODY: dict[str, object] = {"messages": [{"role": "user", "content": "hi"}]}


def sample(metrics: str, name: str, **labels: str) -> float:
    """The value of one series; labels are in alphabetical order there."""
    inside = ",".join(
        f'{key}="{value}"' for key, value in sorted({**labels, "model_name": MODEL}.items())
    )
    pattern = rf"^twinfire:{name}{{{re.escape(inside)}}} (\S+)$"
    match = re.search(pattern, metrics, re.MULTILINE)
    assert match is not None, name
    return float(match[1])


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL, ALIAS]
    assert client.models.retrieve(MODEL).model_extra is not None
    assert client.models.retrieve(ALIAS).id == ALIAS


def test_unknown_model_card_and_version(gateway: RunningGateway) -> None:
    address = gateway.server.address
    assert request(address, "GET", "/v1/models/nope").error()["code"] == "model_not_found"
    card = request(address, "GET", f"/v1/models/{ALIAS}").json()
    assert (card["id"], card["max_model_len"]) == (ALIAS, 512)
    assert request(address, "GET", "/version").json() == {"version": __version__}


def test_health_tells_why_not(gateway: RunningGateway) -> None:
    address = gateway.server.address
    assert request(address, "GET", "/health").status == 200
    assert request(address, "GET", "/ping").status == 200
    gateway.backend.worker_info = None
    gateway.backend.unready_reason = "loading: weights"
    for method, path, body in (
        ("GET", "/health", None),
        ("GET", "/ping", None),
        ("POST", CHAT, BODY),
    ):
        answer = request(address, method, path, body)
        assert answer.status == 503
        assert answer.error()["message"] == "loading: weights"
    assert request(address, "GET", "/v1/models").status == 200


def test_text_side_may_still_load_or_fail() -> None:
    def forget_text(gateway: Gateway) -> None:
        for hosted in gateway.models:
            hosted.model.text = None

    with running_gateway(adjust=forget_text) as gateway:
        address = gateway.server.address
        for path in (CHAT, "/tokenize"):
            answer = request(address, "POST", path, {**BODY, "prompt": None})
            assert (answer.status, answer.error()["message"]) == (503, "loading: tokenizer")
        assert request(address, "GET", "/health").status == 503


def test_key_guards_inference_only() -> None:
    with running_gateway(GatewaySettings(api_keys=("one", "zwei-ü"))) as gateway:
        address = gateway.server.address
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "Basic one"},
            {"authorization": "one"},
            {"authorization": "Bearer "},
        ):
            for method, path, body in (("POST", CHAT, BODY), ("GET", "/v1/models", None)):
                answer = request(address, method, path, body, headers)
                assert (answer.status, answer.error()["code"]) == (401, "invalid_api_key")
                assert answer.headers["www-authenticate"] == "Bearer"
        for key in ("one", "zwei-ü"):
            headers = {"authorization": f"Bearer {key}".encode().decode("latin-1")}
            assert request(address, "POST", CHAT, BODY, headers).status == 200
        for path in ("/health", "/metrics", "/version", "/openapi.json"):
            assert request(address, "GET", path).status == 200


def test_metrics_follow_requests_and_loads(gateway: RunningGateway) -> None:
    with running_gateway(GatewaySettings(vllm_metric_names=True)) as own:
        address = own.server.address
        own.backend.script = say("abc")
        own.backend.cached_tokens = 2
        usage = request(address, "POST", CHAT, BODY).json()["usage"]
        own.backend.refusal = Overloaded("full")
        assert request(address, "POST", CHAT, BODY).status == 429
        text = request(address, "GET", "/metrics").body.decode()
    assert isinstance(usage, dict)
    assert sample(text, "prompt_tokens_total") == usage["prompt_tokens"]
    assert sample(text, "generation_tokens_total") == usage["completion_tokens"] == 4
    assert sample(text, "prompt_tokens_cached_total") == 2
    assert sample(text, "request_success_total", finished_reason="stop") == 1
    assert sample(text, "admission_rejections_total") == 1
    assert sample(text, "time_to_first_token_seconds_count") == 1
    assert sample(text, "inter_token_latency_seconds_count") == 3
    assert sample(text, "e2e_request_latency_seconds_count") == 1
    assert sample(text, "request_params_n_count") == 2
    assert "twinfire:cache_config_info{" in text
    assert 'vllm:generation_tokens_total{model_name="tiny"} 4.0' in text


def test_metrics_count_over_the_lives_of_workers() -> None:
    metrics = Metrics(MODEL)
    metrics.observe_load(Load(10, 2, 3, 4, 16, 7, 1, 100, 40))
    metrics.observe_load(Load(11, 2, 3, 4, 16, 7, 1, 150, 60))
    metrics.observe_load(Load(1, 1, 0, 8, 16, 5, 2, 30, 10))
    text = metrics.render(worker_info()).decode()
    assert sample(text, "num_requests_running") == 1
    assert sample(text, "num_requests_waiting") == 0
    assert sample(text, "kv_cache_usage_perc") == 0.5
    assert sample(text, "num_preemptions_total") == 3
    assert sample(text, "prefix_cache_queries_total") == 180
    assert sample(text, "prefix_cache_hits_total") == 70
    assert sample(text, "iteration_tokens_total_count") == 3


def test_several_models_are_told_apart_by_name() -> None:
    async def main() -> None:
        backends = [ScriptedBackend(), ScriptedBackend()]
        backends[0].script, backends[1].script = say("one"), say("two")
        hosted = [
            HostedModel.of(ServedModel(names, byte_text_side()), backend)
            for names, backend in zip((("a", "a2"), ("b",)), backends, strict=True)
        ]
        server = GatewayServer(
            create_app_of_models(GatewaySettings(), hosted), bind_socket("127.0.0.1", 0)
        )
        serving = asyncio.create_task(server.serve())
        await server.started.wait()

        async def ask(method: str, path: str, body: dict[str, object] | None = None) -> Answer:
            return await asyncio.to_thread(request, server.address, method, path, body)

        for name, text in (("a", "one"), ("a2", "one"), ("b", "two")):
            answer = (await ask("POST", CHAT, {**BODY, "model": name})).body
            assert text.encode() in answer
        assert (await ask("POST", CHAT, {**BODY, "model": "c"})).status == 404
        nameless = await ask("POST", CHAT, BODY)
        assert (nameless.status, nameless.error()["param"]) == (400, "model")
        listed = (await ask("GET", "/v1/models")).body
        assert [card["id"] for card in json.loads(listed)["data"]] == ["a", "a2", "b"]
        metrics = (await ask("GET", "/metrics")).body.decode()
        assert metrics.count("# TYPE twinfire:generation_tokens_total counter") == 1
        assert 'twinfire:generation_tokens_total{model_name="a"} 8.0' in metrics
        assert 'twinfire:generation_tokens_total{model_name="b"} 4.0' in metrics
        backends[1].unready_reason = "loading: weights"
        health = await ask("GET", "/health")
        assert (health.status, health.error()["message"]) == (503, "b: loading: weights")
        assert (await ask("POST", CHAT, {**BODY, "model": "a"})).status == 200
        server.stop()
        await serving

    asyncio.run(main())


def test_two_models_of_one_name_are_refused() -> None:
    hosted = [HostedModel.of(ServedModel(("a",)), ScriptedBackend()) for _ in range(2)]
    with pytest.raises(InvalidRequest, match="two models are called `a`"):
        HostedModels(hosted)


def test_a_wait_that_is_not_wanted_is_told_to_the_backend(gateway: RunningGateway) -> None:
    address = gateway.server.address
    for body, headers, expected in (
        ({}, {}, False),
        ({"rejectIfBusy": True}, {}, True),
        ({}, {"x-reject-if-busy": "1"}, True),
    ):
        assert request(address, "POST", CHAT, {**BODY, **body}, headers).status == 200
        assert gateway.backend.contexts[-1].reject_if_busy is expected
    named = request(address, "POST", CHAT, {**BODY, "prompt_cache_key": "my-session"})
    assert named.headers["cf-session-affinity"] == "my-session"


def hold(backend: ScriptedBackend) -> ScriptedBackend:
    backend.script = say("a story")
    backend.holds_after = 2
    return backend


def test_drain_finishes_what_runs_and_refuses_what_is_new() -> None:
    with running_gateway(make_backend=lambda: hold(ScriptedBackend())) as gateway:
        address = gateway.server.address
        running = open_post(address, CHAT, {**BODY, "stream": True})
        read_until(running, b"data: ")
        gateway.run(gateway.backend.holding.wait())
        gateway.stop()
        answer = request(address, "POST", CHAT, BODY)
        assert (answer.status, answer.error()["message"]) == (503, "the server is shutting down")
        assert request(address, "GET", "/health").status == 503
        gateway.loop.call_soon_threadsafe(gateway.backend.released.set)
        assert b"[DONE]" in read_until(running, b"[DONE]\n\n")
        running.close()


@pytest.mark.parametrize("twice", [False, True])
def test_drain_has_a_limit_and_an_impatient_form(twice: bool) -> None:
    settings = GatewaySettings(drain_timeout_s=60 if twice else 0.05)
    with running_gateway(settings, lambda: hold(ScriptedBackend())) as gateway:
        address = gateway.server.address
        plain = open_post(address, CHAT, BODY)
        gateway.run(gateway.backend.holding.wait())
        stream = open_post(address, CHAT, {**BODY, "stream": True})
        read_until(stream, b"data: ")
        gateway.stop()
        if twice:
            gateway.stop()
        assert b'"code":"shutting_down"' in read_until(stream, b"[DONE]")
        assert read_until(plain, b"shutting_down").startswith(b"HTTP/1.1 503")
        stream.close()
        plain.close()


def test_taken_port_is_told() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(AddressUnavailable, match=f"port {port} on 127.0.0.1 is taken"):
            bind_socket("127.0.0.1", port)
    with pytest.raises(AddressUnavailable, match="not known"):
        bind_socket("no.such.host.invalid", 1)


def test_requests_of_many_threads() -> None:
    with running_gateway(text=byte_text_side()) as gateway:
        statuses: list[int] = []

        def ask() -> None:
            for _ in range(5):
                statuses.append(request(gateway.server.address, "POST", CHAT, BODY).status)

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert statuses == [200] * 40


def test_drain_does_not_wait_for_a_body_that_never_comes() -> None:
    with (
        running_gateway(GatewaySettings(drain_timeout_s=0.05)) as gateway,
        socket.create_connection(gateway.server.address, timeout=20) as connection,
    ):
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{"
        connection.sendall(head)
        request(gateway.server.address, "GET", "/health")
        gateway.stop()
        assert read_until(connection, b"shutting_down").startswith(b"HTTP/1.1 503")
        assert connection.recv(1000) == b""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_drains(number: signal.Signals) -> None:
    async def main() -> str:
        backend = hold(ScriptedBackend())
        app = create_app(GatewaySettings(), backend, ServedModel((MODEL,), byte_text_side()))
        server = GatewayServer(app, bind_socket("127.0.0.1", 0))
        serving = asyncio.create_task(server.serve(handle_signals=True))
        await server.started.wait()
        body = {**BODY, "stream": True}
        asking = asyncio.create_task(asyncio.to_thread(request, server.address, "POST", CHAT, body))
        await backend.holding.wait()
        os.kill(os.getpid(), number)
        health = await asyncio.to_thread(request, server.address, "GET", "/health")
        while health.status == 200:
            health = await asyncio.to_thread(request, server.address, "GET", "/health")
        backend.released.set()
        answer = await asking
        await serving
        return answer.body.decode()

    assert asyncio.run(main()).endswith("data: [DONE]\n\n")
