"""A client that leaves takes its work with it, whatever the request was doing."""

from __future__ import annotations

import pytest

from support.gateway_server import RunningGateway
from support.raw_http import open_post, read_until, request
from support.scripted_backend import say

USER = [{"role": "user", "content": "hi"}]
CHAT: dict[str, object] = {"messages": USER, "n": 2}
COMPLETION: dict[str, object] = {"prompt": ["a", "b"], "n": 2}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("holds_after", [-1, 3])
@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)]
)
def test_generation_ends_within_a_second(
    gateway: RunningGateway, path: str, body: dict[str, object], stream: bool, holds_after: int
) -> None:
    gateway.backend.script = say("a long story")
    gateway.backend.holds_after = holds_after
    connection = open_post(gateway.server.address, path, {**body, "stream": stream})
    gateway.run(gateway.backend.holding.wait())
    if stream and holds_after > 0:
        read_until(connection, b"data: ")
    assert gateway.backend.num_running > 0
    connection.close()
    gateway.run(gateway.backend.idle.wait(), timeout_s=1)
    assert gateway.backend.num_running == 0
    metrics = request(gateway.server.address, "GET", "/metrics").body.decode()
    assert 'finished_reason="abort"' in metrics


def test_body_that_never_ends_leaves_nothing_behind(gateway: RunningGateway) -> None:
    num_submitted = len(gateway.backend.submitted)
    connection = open_post(gateway.server.address, "/v1/completions", {"prompt": "x"})
    read_until(connection, b"\r\n\r\n")
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{"
    connection.sendall(head)
    connection.close()
    assert request(gateway.server.address, "GET", "/health").status == 200
    assert len(gateway.backend.submitted) == num_submitted + 1
