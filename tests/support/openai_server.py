"""A small OpenAI-like server in the test's own event loop, whose answers a test scripts.

Its tokenizer: one token for each word. Nothing in it waits for time to pass: a test that needs an
order of events opens the gates itself.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

TEMPLATE_TOKENS = 7
"""What the pretended chat template adds to every message."""


@dataclass
class Behaviour:
    """How the server answers generation requests."""

    tokens_per_chunk: int = 1
    usage: bool = True
    cached_tokens: int | None = None
    finish_reason: str | None = "length"
    done: bool = True
    status: int = 200
    content_type: str = "text/event-stream"
    raw_chunks: list[bytes] | None = None
    """Sent instead of an answer."""
    drop_after_chunks: int | None = None
    """Break the connection after so many chunks."""
    end_after_tokens: int | None = None
    """Ignore `ignore_eos` and stop there."""
    gate: Callable[[int, int], asyncio.Event] | None = None
    """Called with (request number, chunk number); the chunk waits for the event."""
    tokenize: str | None = "vllm"
    """Shape of `/tokenize`: vllm, llamacpp, or None for none."""
    on_request: Callable[[], None] | None = None
    """Called when a generation request has arrived."""


@dataclass
class FakeServer:
    """What a test sees of the server."""

    url: str = ""
    behaviour: Behaviour = field(default_factory=Behaviour)
    bodies: list[dict[str, object]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    disconnected: asyncio.Event = field(default_factory=asyncio.Event)
    healthy: bool = True
    max_model_len: int | None = 4096

    async def generate(self, request: web.Request) -> web.StreamResponse:
        behaviour = self.behaviour
        body = await request.json()
        number = len(self.bodies)
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if behaviour.on_request is not None:
            behaviour.on_request()
        if behaviour.status != 200:
            error = {"error": {"message": "scripted failure", "type": "x", "code": None}}
            return web.json_response(error, status=behaviour.status)
        response = web.StreamResponse(headers={"Content-Type": behaviour.content_type})
        await response.prepare(request)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            if behaviour.raw_chunks is not None:
                for chunk in behaviour.raw_chunks:
                    await response.write(chunk)
            else:
                await self._answer(request, response, body, number)
        except (ConnectionError, asyncio.CancelledError):
            self.disconnected.set()
            raise
        finally:
            self.in_flight -= 1
        return response

    async def _answer(
        self, request: web.Request, response: web.StreamResponse, body: dict, number: int
    ) -> None:
        behaviour = self.behaviour
        chat = "messages" in body
        wanted = int(body.get("max_tokens") or 16)
        if behaviour.end_after_tokens is not None:
            wanted = min(wanted, behaviour.end_after_tokens)
        if chat:
            await self._send(
                response, {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
            )
        sent = chunk = 0
        while sent < wanted:
            if behaviour.drop_after_chunks == chunk:
                assert request.transport is not None
                request.transport.close()
                return
            if behaviour.gate is not None:
                await behaviour.gate(number, chunk).wait()
            count = min(behaviour.tokens_per_chunk, wanted - sent)
            text = " word" * count
            choice = {"delta": {"content": text}} if chat else {"text": text}
            await self._send(response, {"choices": [choice]})
            sent += count
            chunk += 1
        if behaviour.finish_reason is not None:
            last = {"finish_reason": behaviour.finish_reason}
            choice = {"delta": {}, **last} if chat else {"text": "", **last}
            await self._send(response, {"choices": [choice]})
        if behaviour.usage and body.get("stream_options", {}).get("include_usage"):
            usage = {"prompt_tokens": count_prompt(body), "completion_tokens": sent}
            if behaviour.cached_tokens is not None:
                usage["prompt_tokens_details"] = {"cached_tokens": behaviour.cached_tokens}
            await self._send(response, {"choices": [], "usage": usage})
        if behaviour.done:
            await response.write(b"data: [DONE]\n\n")

    async def _send(self, response: web.StreamResponse, chunk: dict) -> None:
        await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        match self.behaviour.tokenize:
            case "vllm" if "prompt" in body:
                return web.json_response({"count": count_words(body["prompt"]), "tokens": []})
            case "llamacpp" if "content" in body:
                return web.json_response({"tokens": list(range(count_words(body["content"])))})
            case "vllm" | "llamacpp":
                return web.json_response({"error": {"message": "wrong field"}}, status=400)
        return web.Response(status=404)

    async def models(self, request: web.Request) -> web.Response:
        card = {"id": "fake", "object": "model", "max_model_len": self.max_model_len}
        return web.json_response({"object": "list", "data": [card]})

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)


def count_words(text: str) -> int:
    return len(text.split())


def count_prompt(body: dict) -> int:
    if "messages" in body:
        return sum(count_words(m["content"]) + TEMPLATE_TOKENS for m in body["messages"])
    return count_words(body["prompt"])


@asynccontextmanager
async def fake_server(behaviour: Behaviour | None = None) -> AsyncIterator[FakeServer]:
    """Serve on a free port of the loopback interface."""
    server = FakeServer(behaviour=behaviour or Behaviour())
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/v1/chat/completions", server.generate)
    app.router.add_post("/v1/completions", server.generate)
    app.router.add_post("/tokenize", server.tokenize)
    app.router.add_get("/v1/models", server.models)
    app.router.add_get("/health", server.health)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    server.url = f"http://{host}:{port}"
    try:
        yield server
    finally:
        await runner.cleanup()
