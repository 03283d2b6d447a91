"""What the dashboard is told: over real sockets, by one gateway over a scripted worker."""

from __future__ import annotations

import asyncio
import http.client
import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from support.gateway_server import MODEL, RunningGateway, running_gateway
from support.raw_http import request
from support.scripted_backend import ScriptedBackend, say
from twinfire.gateway.gateway import Gateway
from twinfire.gateway.request_log import FinishedRequest

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20}


@pytest.fixture
def seen() -> list[Gateway]:
    return []


@pytest.fixture
def server(seen: list[Gateway]) -> Iterator[RunningGateway]:
    with running_gateway(
        make_backend=lambda: ScriptedBackend(say("Hello there.")), adjust=seen.append
    ) as running:
        yield running


def chat(server: RunningGateway, **more: object) -> int:
    return request(server.server.address, "POST", "/v1/chat/completions", {**CHAT, **more}).status


def snapshot(server: RunningGateway) -> Any:
    answer = request(server.server.address, "GET", "/dashboard/api/snapshot")
    assert answer.status == 200, answer.body
    assert answer.headers["cache-control"] == "no-store"
    return answer.json()


class Stream:
    """Reads a stream's events as they come."""

    def __init__(self, server: RunningGateway) -> None:
        self.connection = http.client.HTTPConnection(*server.server.address, timeout=20)
        self.connection.request("GET", "/dashboard/api/stream")
        self.response = self.connection.getresponse()

    def close(self) -> None:
        # The answer holds the socket too.
        self.response.close()
        self.connection.close()

    def next(self) -> tuple[str, Any]:
        name = ""
        while line := self.response.readline().decode().rstrip("\n"):
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                data = json.loads(line[6:])
        return (name, data) if name else ("", None)


def wait_until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline_s, "it never came true"
        time.sleep(0.01)


def test_a_snapshot_of_a_gateway_with_its_own_worker(server: RunningGateway) -> None:
    assert chat(server) == 200
    seen = snapshot(server)
    assert seen["model_names"][0] == MODEL
    assert seen["now"]["is_draining"] is False
    (worker,) = seen["now"]["cluster"]["workers"]
    assert (worker["role"], worker["kv_blocks_total"], worker["block_size"]) == ("mixed", 64, 32)
    (model,) = seen["now"]["models"]
    assert model["totals"]["output_tokens"] == len("Hello there.") + 1
    assert model["totals"]["requests"] == 1
    assert model["totals"]["ttft_s"]["p50"] > 0
    # One look gives no rate.
    assert model["point"]["output_tokens_per_s"] is None


def test_a_finished_request_has_its_counts_and_the_parts_of_its_first_token(
    server: RunningGateway,
) -> None:
    server.backend.cached_tokens = 1
    assert chat(server) == 200
    (logged,) = snapshot(server)["finished"]
    assert logged["outcome"] == "finished"
    assert logged["endpoint"] == "/v1/chat/completions"
    assert (logged["number"], logged["status"], logged["account"]) == (1, 200, "open")
    assert logged["cached_tokens"] == 1
    assert logged["output_tokens"] == len("Hello there.") + 1
    parts = logged["first_token_parts"]
    assert set(parts) == {"request", "prefill_queue", "prefill", "first_decode"}
    assert (parts["prefill_queue"], parts["prefill"]) == (0.001, 0.002)
    # The script says longer times than it takes.
    assert sum(parts.values()) >= logged["ttft_s"] > 0
    assert "Hello" not in json.dumps(logged)


def test_refusals_and_clients_that_left_are_listed(server: RunningGateway) -> None:
    assert chat(server, temperature=-1) == 400
    server.backend.holds_after = 2
    connection = http.client.HTTPConnection(*server.server.address, timeout=20)
    body = json.dumps({**CHAT, "stream": True})
    connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
    response = connection.getresponse()
    response.readline()
    wait_until(server.backend.holding.is_set)
    (running,) = snapshot(server)["now"]["running"]
    assert (running["model"], running["output_tokens"]) == (MODEL, 2)
    response.close()
    connection.close()
    wait_until(lambda: len(snapshot(server)["finished"]) == 2)
    refused, left = snapshot(server)["finished"]
    assert (refused["status"], refused["outcome"], refused["output_tokens"]) == (400, "failed", 0)
    assert (left["outcome"], left["output_tokens"]) == ("cancelled", 2)
    assert snapshot(server)["now"]["running"] == []


def test_the_log_is_bounded(server: RunningGateway, seen: list[Gateway]) -> None:
    log = seen[0].requests
    one = FinishedRequest(
        request_id="r",
        account="a",
        endpoint="/",
        model="m",
        started_s=0.0,
        status=200,
        outcome="finished",
        finish="stop",
        total_s=1.0,
    )
    for _ in range(1000):
        log._add(one)
    numbers = [request["number"] for request in snapshot(server)["finished"]]
    assert numbers == list(range(745, 1001))


def test_an_observer_that_fails_breaks_no_request(
    server: RunningGateway, seen: list[Gateway]
) -> None:
    def fails(request: FinishedRequest) -> None:
        raise RuntimeError("the collector is away")

    seen[0].requests.report_to(fails)
    assert chat(server) == 200


def test_a_stream_begins_with_everything_and_goes_on_with_what_changes(
    server: RunningGateway,
) -> None:
    with closing(Stream(server)) as stream:
        assert "content-security-policy" in {name.lower() for name in stream.response.headers}
        name, first = stream.next()
        assert (name, first["finished"]) == ("snapshot", [])
        assert chat(server) == 200
        frames = [stream.next() for _ in range(2)]
        assert [name for name, _ in frames] == ["frame", "frame"]
        (logged,) = [one for _, frame in frames for one in frame["finished"]]
        assert logged["number"] == 1
        point = frames[-1][1]["now"]["models"][0]["point"]
        assert point["output_tokens_per_s"] > 0
        assert point["ttft_s"]["p99"] >= point["ttft_s"]["p50"] > 0
        assert point["cached_share"] == 0.0
    assert len(snapshot(server)["history"]) >= 2


def test_nothing_is_sampled_while_nobody_looks(server: RunningGateway) -> None:
    def tasks() -> int:
        async def count() -> int:
            return sum("Feed._sample" in repr(task) for task in asyncio.all_tasks())

        return server.run(count())

    assert tasks() == 0
    with closing(Stream(server)) as one, closing(Stream(server)) as other:
        one.next()
        other.next()
        assert tasks() == 1
    wait_until(lambda: tasks() == 0)


def test_a_drain_ends_streams_and_does_not_wait_for_them() -> None:
    with running_gateway() as server, closing(Stream(server)) as stream:
        stream.next()
        began_s = time.monotonic()
        server.stop()
        while stream.next()[0]:
            pass
    assert time.monotonic() - began_s < 8


def test_usage_is_summed_up(server: RunningGateway) -> None:
    for _ in range(2):
        assert chat(server) == 200
    answer = request(server.server.address, "GET", "/dashboard/api/usage?days=7")
    usage: Any = answer.json()
    (account,) = usage["by_account"]
    assert (account["account"], account["requests"], account["finished"]) == ("open", 2, 2)
    assert usage["by_model"][0]["model"] == MODEL
    assert usage["by_day"][0]["day"] == time.strftime("%Y-%m-%d", time.gmtime())
    assert usage["totals"][0]["output_tokens"] == account["output_tokens"] > 0
    assert usage["budgets"] == []


@pytest.mark.parametrize("days", ["0", "367", "x", "-1", "1.5", ""])
def test_wrong_days_are_named(server: RunningGateway, days: str) -> None:
    answer = request(server.server.address, "GET", f"/dashboard/api/usage?days={days}")
    assert answer.status == 400
    assert answer.error()["param"] == "days"
