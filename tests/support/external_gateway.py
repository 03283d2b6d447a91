"""A gateway whose model is served by mock engines, on a real socket in the test's event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import aiohttp

from support.gateway_server import byte_text_side
from support.scripted_backend import ScriptedBackend
from twinfire.gateway.app import create_app_of_models
from twinfire.gateway.external.external_models import ExternalModels
from twinfire.gateway.external.external_pool import ExternalPool
from twinfire.gateway.external.external_table import ExternalTable
from twinfire.gateway.hosted_model import HostedModel
from twinfire.gateway.listening import bind_socket
from twinfire.gateway.served_model import ServedModel
from twinfire.gateway.server import GatewayServer
from twinfire.gateway.settings import GatewaySettings

PATHS = ("/v1/chat/completions", "/v1/completions")
CHAT: dict[str, object] = {
    "model": "public",
    "messages": [{"role": "user", "content": "Was brennt? " * 20}],
    "max_tokens": 6,
}
STREAM = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    content: bytes

    def json(self) -> dict:
        return json.loads(self.content)

    def events(self) -> list:
        frames = [one for one in self.content.decode().split("\n\n") if one.startswith("data: ")]
        return [one if one == "[DONE]" else json.loads(one) for one in (f[6:] for f in frames)]

    def text(self) -> str:
        chunks = [event for event in self.events() if event != "[DONE]"]
        deltas = [c["delta"] for chunk in chunks for c in chunk.get("choices", [])]
        return "".join(delta.get("content") or "" for delta in deltas)


class ExternalGateway:
    def __init__(self, url: str, pool: ExternalPool, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.pool = pool
        self.session = session

    async def post(
        self, body: dict[str, object], path: str = PATHS[0], headers: dict[str, str] | None = None
    ) -> Answer:
        async with self.session.post(self.url + path, json=body, headers=headers) as response:
            return Answer(response.status, dict(response.headers), await response.read())

    def assert_idle(self) -> None:
        engines = self.pool.engines
        for server in (*engines.prefill.servers, *engines.decode.servers):
            assert server.ledger.load == 0
            assert server.ledger.num_entries == 0


@asynccontextmanager
async def external_gateway(
    table: ExternalTable, settings: GatewaySettings | None = None
) -> AsyncIterator[ExternalGateway]:
    pool = ExternalPool(("public",), table)
    external = ExternalModels([pool])
    own = HostedModel.of(ServedModel(("t",), byte_text_side()), ScriptedBackend())
    app = create_app_of_models(settings or GatewaySettings(), [own], external=external)
    server = GatewayServer(app, bind_socket("127.0.0.1", 0))
    async with AsyncExitStack() as stack:
        await external.start()
        stack.push_async_callback(external.close)
        serving = asyncio.create_task(server.serve())
        await server.started.wait()
        session = await stack.enter_async_context(aiohttp.ClientSession())
        try:
            yield ExternalGateway(f"http://127.0.0.1:{server.address[1]}", pool, session)
        finally:
            await session.close()
            server.stop()
            server.stop()
            await serving


def external_table(
    kind: str, decode: Sequence[str], prefill: Sequence[str] = (), **more: object
) -> ExternalTable:
    """Engines in `decode` do both stages where nobody else computes prompts."""
    more.setdefault("engine_model", "engine-model")
    stages = {"prefill": tuple(prefill), "decode": tuple(decode)}
    return ExternalTable(
        engine=kind,  # type: ignore[arg-type]
        **(stages if prefill else {"mixed": tuple(decode)}),  # type: ignore[arg-type]
        **more,  # type: ignore[arg-type]
    )


async def until(condition: Callable[[], bool], limit_s: float = 5) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.005)
