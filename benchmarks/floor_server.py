"""The least that a gateway can do: one wake-up per engine step, one write per stream.

Connects to a running worker as another gateway, submits a fixed job for every POST that it gets,
and answers each token with the same event. No text, no checks, no metrics, so that
`gateway_cost.py` can say how much of a gateway's CPU the machine itself asks for.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import secrets
import socket
import sys
from typing import cast

from twinfire.gateway.listening import bind_socket, run_event_loop
from twinfire.protocol.framing import encode_frame, gateway_side_decoder
from twinfire.protocol.messages import PROTOCOL_VERSION, Hello, StepFrame, Submit
from twinfire.protocol.sampling import SamplingParams
from twinfire.protocol.tokens import pack_ids

CHUNK_BYTES = 250
_HEADERS = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
_NOT_FOUND = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
_EVENT = b'data: {"id":"%s","object":"chat.completion.chunk","created":1,"model":"floor",'
_EVENT += b'"choices":[{"index":0,"delta":%s,"finish_reason":%s}]}\n\n'
_VOCABULARY = 10_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--worker-socket", required=True)
    parser.add_argument("--input-tokens", type=int, required=True)
    parser.add_argument("--output-tokens", type=int, required=True)
    args = parser.parse_args()
    run_event_loop(_serve(args, bind_socket("127.0.0.1", args.port)))
    return 0


async def _serve(args: argparse.Namespace, bound: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    floor = Floor(args.input_tokens, args.output_tokens)
    await loop.create_unix_connection(lambda: floor, args.worker_socket)
    server = await loop.create_server(lambda: _Connection(floor), sock=bound)
    await server.serve_forever()


class Floor(asyncio.Protocol):
    """The link to the worker, and the streams that wait for its tokens."""

    def __init__(self, num_input_tokens: int, num_output_tokens: int) -> None:
        self._num_input_tokens = num_input_tokens
        self._num_output_tokens = num_output_tokens
        self._decoder = gateway_side_decoder()
        self._ids = itertools.count(1)
        self._streams: dict[int, asyncio.Transport] = {}
        self._token = _chunk(b'{"content":"floor"}', b"null")
        self._end = _chunk(b"{}", b'"length"') + _http_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._link = cast(asyncio.Transport, transport)
        self._link.write(encode_frame(Hello(PROTOCOL_VERSION, "floor")))

    def submit(self, client: asyncio.Transport) -> None:
        """Send the job; `client` gets its tokens."""
        request_id = next(self._ids)
        self._streams[request_id] = client
        prompt = [secrets.randbelow(_VOCABULARY) for _ in range(self._num_input_tokens)]
        sampling = SamplingParams(max_tokens=self._num_output_tokens, seed=1, ignore_eos=True)
        self._link.write(encode_frame(Submit(request_id, pack_ids(prompt), sampling)))
        client.write(_HEADERS)

    def data_received(self, data: bytes) -> None:
        for message in self._decoder.feed(data):
            if isinstance(message, StepFrame):
                for delta in message.deltas:
                    if delta.finish_reason is None:
                        self._streams[delta.request_id].write(self._token)
                    else:
                        self._streams.pop(delta.request_id).write(self._token + self._end)

    def connection_lost(self, exc: Exception | None) -> None:
        asyncio.get_running_loop().stop()


class _Connection(asyncio.Protocol):
    """One client: every complete POST is a job."""

    def __init__(self, floor: Floor) -> None:
        self._floor = floor
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        if not end:
            return
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        if len(body) < int(fields.get(b"content-length", b"0")):
            return
        self._received = b""
        if head.startswith(b"POST"):
            self._floor.submit(self._transport)
        else:
            self._transport.write(_NOT_FOUND)


def _chunk(delta: bytes, finish: bytes) -> bytes:
    empty = _EVENT % (b"", delta, finish)
    return _http_chunk(_EVENT % (b"x" * (CHUNK_BYTES - len(empty)), delta, finish))


def _http_chunk(content: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(content), content)


if __name__ == "__main__":
    sys.exit(main())
