"""An edge before gateways, in the test's own event loop, and a region whose bytes a test writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from twinfire.gateway.edge.edge import Edge
from twinfire.gateway.edge.edge_server import EdgeServer
from twinfire.gateway.edge.edge_settings import EdgeSettings, RegionAddress
from twinfire.gateway.listening import bind_socket

HEALTHY = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
SESSION = {"x-session-affinity": "s"}


@dataclass
class RawRequest:
    head: bytes
    body: bytes

    @property
    def headers(self) -> dict[str, str]:
        lines = self.head.decode().split("\r\n")[1:]
        return {k.lower(): v for k, _, v in (line.partition(": ") for line in lines if line)}


Answering = Callable[[asyncio.StreamWriter], Awaitable[None]]


async def say_ok(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")


def saying(content: bytes) -> Answering:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(content)

    return answer


@dataclass
class RawRegion:
    """One request a connection; requests for its health are not recorded."""

    url: str = ""
    answering: Answering = say_ok
    healthy: bool = True
    requests: list[RawRequest] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    """The peer ended a connection with a request on it."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET /health"):
                writer.write(HEALTHY if self.healthy else HEALTHY.replace(b"200 OK", b"503 No"))
                return
            self.arrived.set()
            self.requests.append(RawRequest(head, await _read_body(reader, head)))
            answering = asyncio.ensure_future(self.answering(writer))
            leaving = asyncio.ensure_future(reader.read())
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if leaving.done():
                self.closed.set()
            leaving.cancel()
            answering.cancel()
            await asyncio.gather(leaving, answering, return_exceptions=True)
        except (ConnectionError, asyncio.IncompleteReadError):
            self.closed.set()
        finally:
            writer.close()


async def _read_body(reader: asyncio.StreamReader, head: bytes) -> bytes:
    lines = head.lower().split(b"\r\n")
    for line in lines:
        if line.startswith(b"content-length:"):
            return await reader.readexactly(int(line.split(b":")[1]))
    body = b""
    if b"transfer-encoding: chunked" in lines:
        while size := int(await reader.readline(), 16):
            body += await reader.readexactly(size)
            await reader.readline()
        await reader.readline()
    return body


@asynccontextmanager
async def raw_region(answering: Answering = say_ok) -> AsyncIterator[RawRegion]:
    region = RawRegion(answering=answering)
    server = await asyncio.start_server(region.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    region.url = f"http://{host}:{port}"
    try:
        yield region
    finally:
        server.close()


@dataclass
class RunningEdge:
    edge: Edge
    host: str
    port: int

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def home(self, session: str = "s", account: bytes | None = None) -> str:
        """Name of the region that a session belongs to."""
        from twinfire.gateway.edge.session_key import SessionKey, account_of

        key = SessionKey(account_of({}) if account is None else account, session)
        return key.ranked(self.edge.regions)[0].name


@asynccontextmanager
async def running_edge(regions: dict[str, str], **settings: object) -> AsyncIterator[RunningEdge]:
    addresses = tuple(RegionAddress(name, url) for name, url in regions.items())
    edge = Edge(EdgeSettings(addresses, **settings))  # type: ignore[arg-type]
    server = EdgeServer(edge, bind_socket("127.0.0.1", 0), drain_timeout_s=1)
    serving = asyncio.create_task(server.serve())
    await server.started.wait()
    try:
        yield RunningEdge(edge, *server.address)
    finally:
        server.stop()
        await serving
