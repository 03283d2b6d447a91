"""HTTP without a client library: what goes over the socket is exactly what a test says."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> dict[str, object]:
        return json.loads(self.body)

    def error(self) -> dict[str, object]:
        """The error object, checked for its whole shape."""
        body = self.json()
        assert set(body) == {"error"}
        error = body["error"]
        assert isinstance(error, dict)
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert error["message"]
        return error

    def events(self) -> list[object]:
        """The data of the server-sent events, decoded; "[DONE]" stays a string."""
        frames = [frame for frame in self.body.decode().split("\n\n") if frame]
        assert self.body.endswith(b"\n\n")
        datas = [frame.removeprefix("data: ") for frame in frames if not frame.startswith(":")]
        return [data if data == "[DONE]" else json.loads(data) for data in datas]


def request(
    address: tuple[str, int],
    method: str,
    path: str,
    body: bytes | dict[str, object] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    connection = http.client.HTTPConnection(*address, timeout=30)
    sent = dict(headers or {})
    if isinstance(body, dict):
        body = json.dumps(body).encode()
    if body is not None:
        sent.setdefault("content-type", "application/json")
    try:
        connection.request(method, path, body, sent)
        response = connection.getresponse()
        content = response.read()
        return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, content)
    finally:
        connection.close()


def open_post(
    address: tuple[str, int],
    path: str,
    body: dict[str, object],
    headers: Sequence[tuple[str, str]] = (),
) -> socket.socket:
    """Send a whole request and return the socket, on which the answer may be read."""
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n"
        + "".join(f"{name}: {value}\r\n" for name, value in headers)
        + "\r\n"
    )
    connection = socket.create_connection(address, timeout=30)
    connection.sendall(head.encode() + content)
    return connection


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    received = b""
    while mark not in received:
        chunk = connection.recv(65536)
        assert chunk, f"the connection ended before {mark!r}: {received!r}"
        received += chunk
    return received
