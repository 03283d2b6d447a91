"""vLLM's HTTP side with its KV hand-off, faithful in what it demands, rejects and leaves behind.

A real HTTP server whose "KV" is a table of handles: made by a request for one token that asks for
remote decode, used up by the one request that pulls it. Engines find each other by engine id in a
`Fabric`, as NIXL agents do by their metadata. Nothing waits for time to pass.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

WORDS = ["Twin", " fires", " brûlent", " 双子", " ever", "."]
BLOCK_TOKENS = 16


@dataclass
class Fabric:
    """Engines by id."""

    engines: dict[str, MockVllm] = field(default_factory=dict)

    @property
    def num_held(self) -> int:
        return sum(len(engine.held) for engine in self.engines.values())


@dataclass
class MockVllm:
    fabric: Fabric
    model: str = "engine-model"
    engine_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    url: str = ""
    cached_tokens: int = 5
    own_ids: bool = False
    """Make up answer ids instead of using X-Request-Id."""
    omit_role: bool = False
    held: dict[str, list[int]] = field(default_factory=dict)
    bodies: list[dict] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    fail_status: int | None = None
    fail_message: str = "scripted failure"
    die_after_chunks: int | None = None
    error_after_chunks: int | None = None
    finish_reason: str = "length"
    prompt_gate: asyncio.Event | None = None
    """Computing a prompt waits for it."""
    pull_gate: asyncio.Event | None = None
    chunk_gate: Callable[[int], asyncio.Event | None] | None = None
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    num_running: int = 0
    num_pulled: int = 0
    num_own_prompts: int = 0
    healthy: bool = True

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        self.num_running += 1
        self.arrived.set()
        params = body.get("kv_transfer_params") or {}
        try:
            fault = self._validate(body, params)
            if fault is not None:
                self._release(params)
                return fault
            if self.fail_status is not None:
                return error(self.fail_status, self.fail_message)
            try:
                return await self._run(request, body, params)
            except asyncio.CancelledError:
                self._release(params)
                self.aborted.set()
                raise
        finally:
            self.num_running -= 1

    def _validate(self, body: dict, params: dict) -> web.Response | None:
        if body.get("model") != self.model:
            return error(404, f"The model `{body.get('model')}` does not exist.")
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        if limit < 1:
            return error(400, "max_tokens must be at least 1", "max_tokens")
        if (body.get("temperature") or 0) < 0:
            return error(400, "temperature must be non-negative", "temperature")
        if (body.get("min_tokens") or 0) > limit:
            return error(400, "min_tokens must be less than or equal to max_tokens")
        if body.get("stream_options") is not None and not body.get("stream"):
            return error(400, "Stream options can only be defined when `stream=True`.")
        if not (body.get("messages") or body.get("prompt")):
            return error(400, "nothing to do", "prompt")
        if "bootstrap_room" in body:
            return error(400, "unknown field bootstrap_room")
        if params.get("do_remote_prefill"):
            wanted = ("engine_id", "block_ids", "request_id", "host", "port")
            missing = [name for name in wanted if params.get(f"remote_{name}") is None]
            if missing:
                return error(400, f"Got invalid KVTransferParams: {params}.")
        return None

    async def _run(self, request: web.Request, body: dict, params: dict) -> web.StreamResponse:
        chat = request.path.endswith("chat/completions")
        prefix = "chatcmpl-" if chat else "cmpl-"
        given = request.headers.get("X-Request-Id")
        answer_id = prefix + (uuid.uuid4().hex if self.own_ids or not given else given)
        num_prompt = max(1, len(json.dumps(body.get("messages") or body.get("prompt"))) // 4)
        n = body.get("n") or 1
        if params.get("do_remote_prefill"):
            for _ in range(n):
                if self.pull_gate is not None:
                    await self.pull_gate.wait()
                holder = self.fabric.engines.get(params["remote_engine_id"])
                blocks = holder.held.pop(params["remote_request_id"], None) if holder else None
                if blocks != params["remote_block_ids"]:
                    return error(500, "KV load failure: unknown request")
                self.num_pulled += 1
            cached = num_prompt - 1
        else:
            if self.prompt_gate is not None:
                await self.prompt_gate.wait()
            self.num_own_prompts += 1
            cached = self.cached_tokens
        wanted = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        words = WORDS[:wanted]
        usage = {
            "prompt_tokens": num_prompt,
            "total_tokens": num_prompt + len(words),
            "completion_tokens": len(words),
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if not body.get("stream"):
            finish = self.finish_reason if not body.get("stop") or wanted > 1 else "stop"
            answer = {
                "id": answer_id,
                "object": "chat.completion" if chat else "text_completion",
                "model": self.model,
                "choices": [whole(chat, i, "".join(words), finish) for i in range(n)],
                "usage": usage,
                "kv_transfer_params": None,
            }
            if params.get("do_remote_decode") and wanted == 1 and finish == "length":
                answer["kv_transfer_params"] = self._hold(num_prompt)
            return web.json_response(answer)

        def usage_so_far(body: dict, number: int) -> dict:
            if not (body.get("stream_options") or {}).get("continuous_usage_stats"):
                return {}
            counts = {"prompt_tokens": num_prompt, "completion_tokens": number + 1}
            return {"usage": counts | {"total_tokens": num_prompt + number + 1}}

        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        head = {
            "id": answer_id,
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": 1,
            "model": self.model,
        }
        if chat and not self.omit_role:
            for i in range(n):
                delta = {"role": "assistant", "content": ""}
                await send(response, {**head, "choices": [{"index": i, "delta": delta}]})
        for number, word in enumerate(words):
            gate = self.chunk_gate(number) if self.chunk_gate else None
            if gate is not None:
                await gate.wait()
            if self.die_after_chunks == number:
                assert request.transport is not None
                request.transport.abort()
                return response
            if self.error_after_chunks == number:
                fault = {"message": "EngineCore died", "type": "InternalServerError", "code": 500}
                await send(response, {"error": fault})
                await response.write(b"data: [DONE]\n\n")
                return response
            last = self.finish_reason if number == len(words) - 1 else None
            for i in range(n):
                text = {"delta": {"content": word}} if chat else {"text": word}
                choice = {"index": i, **text, "finish_reason": last}
                await send(response, {**head, "choices": [choice], **usage_so_far(body, number)})
        if (body.get("stream_options") or {}).get("include_usage"):
            await send(response, {**head, "choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    def _hold(self, num_prompt: int) -> dict:
        request_id = uuid.uuid4().hex
        self.held[request_id] = list(range(num_prompt // BLOCK_TOKENS + 1))
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": self.held[request_id],
            "remote_engine_id": self.engine_id,
            "remote_request_id": request_id,
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
        }

    def _release(self, params: dict) -> None:
        """Tell the holder that nobody will pull, as on rejection and abort."""
        holder = self.fabric.engines.get(params.get("remote_engine_id") or "")
        if holder is not None:
            holder.held.pop(params["remote_request_id"], None)

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)


def error(status: int, message: str, param: str | None = None) -> web.Response:
    detail = {"message": message, "type": "BadRequestError", "param": param, "code": status}
    return web.json_response({"error": detail}, status=status)


def whole(chat: bool, index: int, text: str, finish: str) -> dict:
    said = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    return {"index": index, **said, "finish_reason": finish}


async def send(response: web.StreamResponse, chunk: dict) -> None:
    await response.write(
        b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
    )


@asynccontextmanager
async def serve_engine(engine: object) -> AsyncIterator[str]:
    """Serve a mock engine on a free port of the loopback interface; yields its URL."""
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/v1/chat/completions", engine.generate)  # type: ignore[attr-defined]
    app.router.add_post("/v1/completions", engine.generate)  # type: ignore[attr-defined]
    app.router.add_get("/health", engine.health)  # type: ignore[attr-defined]
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def mock_vllm(fabric: Fabric, **settings: object) -> AsyncIterator[MockVllm]:
    engine = MockVllm(fabric, **settings)  # type: ignore[arg-type]
    fabric.engines[engine.engine_id] = engine
    async with serve_engine(engine) as url:
        engine.url = url
        yield engine
