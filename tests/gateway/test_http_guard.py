"""Sizes and times of HTTP itself: raw bytes over a real socket."""

from __future__ import annotations

import json
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.gateway_server import RunningGateway, running_gateway
from support.raw_http import open_post, read_until, request
from support.scripted_backend import ScriptedBackend
from support.tls_files import GATEWAY, WORKER
from twinfire.gateway.server import tls_context
from twinfire.gateway.settings import GatewaySettings, HttpLimits, TlsPair
from twinfire.protocol.errors import InvalidRequest

CHAT = "/v1/chat/completions"
GET = b"GET /health HTTP/1.1\r\nhost: x\r\n"
TIGHT = HttpLimits(
    max_connections=8,
    max_header_bytes=4096,
    max_headers=20,
    header_timeout_s=0.3,
    body_timeout_s=0.3,
    idle_timeout_s=1,
    stall_timeout_s=0.3,
)


@pytest.fixture(scope="module")
def gateway() -> Iterator[RunningGateway]:
    with running_gateway(GatewaySettings(http=TIGHT)) as running:
        yield running


@contextmanager
def connected(gateway: RunningGateway) -> Iterator[socket.socket]:
    with socket.create_connection(gateway.server.address, timeout=10) as connection:
        yield connection


def rest_of(connection: socket.socket) -> bytes:
    """Everything until the server closes."""
    received = b""
    try:
        while chunk := connection.recv(65536):
            received += chunk
    except ConnectionResetError:
        pass
    return received


def error_code(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    return int(head.split()[1]), json.loads(body)["error"]["code"]


@pytest.mark.parametrize(
    "extra",
    [
        b"".join(b"x-%d: a\r\n" % number for number in range(30)),
        b"x-long: " + b"a" * 5000 + b"\r\n",
        b"x-endless: " + b"a" * 20000,
    ],
    ids=["many", "long", "endless"],
)
def test_too_many_headers(gateway: RunningGateway, extra: bytes) -> None:
    with connected(gateway) as connection:
        connection.sendall(GET + extra + b"\r\n")
        assert error_code(rest_of(connection)) == (431, "headers_too_large")


def test_a_long_url(gateway: RunningGateway) -> None:
    with connected(gateway) as connection:
        connection.sendall(b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\n\r\n")
        assert error_code(rest_of(connection)) == (431, "headers_too_large")


def test_what_is_not_http(gateway: RunningGateway) -> None:
    with connected(gateway) as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        assert error_code(rest_of(connection)) == (400, "invalid_http")


def test_headers_that_drip(gateway: RunningGateway) -> None:
    begin_s = time.monotonic()
    with connected(gateway) as connection:
        connection.sendall(GET)
        assert error_code(rest_of(connection)) == (408, "request_timeout")
    assert time.monotonic() - begin_s < 5


def test_a_connection_that_says_nothing_is_closed(gateway: RunningGateway) -> None:
    with connected(gateway) as connection:
        assert rest_of(connection) == b""


def test_a_body_that_does_not_come(gateway: RunningGateway) -> None:
    with connected(gateway) as connection:
        head = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{" % CHAT.encode()
        connection.sendall(head)
        assert error_code(rest_of(connection)) == (408, "request_timeout")


def test_a_body_that_drips_behind_its_answer_is_cut() -> None:
    settings = GatewaySettings(http=TIGHT, access="tokens")
    with running_gateway(settings) as strict, connected(strict) as connection:
        connection.sendall(
            b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: 99999\r\n\r\n{" % CHAT.encode()
        )
        assert read_until(connection, b"invalid_api_key").startswith(b"HTTP/1.1 401")

        def drip() -> None:
            for _ in range(250):
                connection.sendall(b" ")
                time.sleep(0.02)

        with pytest.raises(ConnectionError):
            drip()


def test_one_request_after_another_and_a_pause_between(gateway: RunningGateway) -> None:
    with connected(gateway) as connection:
        for _ in range(3):
            connection.sendall(GET + b"\r\n")
            assert b"200 OK" in read_until(connection, b"ready")
            time.sleep(0.4)


def test_slow_answers_are_not_slow_requests(gateway: RunningGateway) -> None:
    gateway.backend.holds_after = 3
    try:
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        with open_post(gateway.server.address, CHAT, body) as connection:
            read_until(connection, b"content")
            time.sleep(0.8)
            gateway.loop.call_soon_threadsafe(gateway.backend.released.set)
            read_until(connection, b"[DONE]")
    finally:
        gateway.backend.holds_after = None


def test_more_connections_than_there_may_be(gateway: RunningGateway) -> None:
    crowd = [socket.create_connection(gateway.server.address, timeout=10) for _ in range(8)]
    try:
        with connected(gateway) as connection:
            assert error_code(rest_of(connection)) == (503, "too_many_connections")
    finally:
        for one in crowd:
            one.close()
    deadline_s = time.monotonic() + 5
    while True:
        try:
            assert request(gateway.server.address, "GET", "/health").status == 200
            return
        except (AssertionError, OSError):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)


def test_a_client_that_does_not_read_is_dropped() -> None:
    def endless() -> ScriptedBackend:
        return ScriptedBackend(script=lambda *_: [65] * 400, tokens_per_step=1)

    with running_gateway(GatewaySettings(http=TIGHT), endless) as running:
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "n": 64}
        # Far more than the system's own buffers take.
        content = json.dumps({**body, "logprobs": True, "top_logprobs": 20}).encode()
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(20)
            connection.connect(running.server.address)
            connection.sendall(
                b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n%b" % (CHAT.encode(), len(content), content)
            )
            deadline_s = time.monotonic() + 20
            while not running.backend.cancelled:
                assert time.monotonic() < deadline_s
                time.sleep(0.05)


@pytest.mark.parametrize("depth", [2_000, 200_000])
@pytest.mark.parametrize("field", ["messages", "tools", "chat_template_kwargs"])
def test_deep_bodies_are_refused(gateway: RunningGateway, depth: int, field: str) -> None:
    nested = b'{"messages":[{"role":"user","content":"a"}],"%b":' % field.encode()
    nested += b"[" * depth + b"]" * depth + b"}"
    answer = request(gateway.server.address, "POST", CHAT, nested)
    assert answer.status == 400
    assert "nested too deeply" in answer.error()["message"] or field in answer.error()["message"]


def test_tls() -> None:
    pair = TlsPair(GATEWAY.certificate, GATEWAY.key)
    with running_gateway(GatewaySettings(tls=pair)) as running:
        context = ssl.create_default_context(cafile=GATEWAY.authority)
        context.check_hostname = False
        with (
            socket.create_connection(running.server.address, timeout=10) as plain,
            context.wrap_socket(plain) as connection,
        ):
            connection.sendall(GET + b"\r\n")
            assert b"200 OK" in read_until(connection, b"ready")  # type: ignore[arg-type]
        with socket.create_connection(running.server.address, timeout=10) as plain:
            plain.sendall(GET + b"\r\n")
            assert b"HTTP" not in rest_of(plain)


def test_wrong_tls_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no certificate with its key"):
        tls_context(TlsPair(GATEWAY.certificate, WORKER.key))
    with pytest.raises(InvalidRequest, match=r"none\.pem"):
        tls_context(TlsPair(str(tmp_path / "none.pem"), GATEWAY.key))
