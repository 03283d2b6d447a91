"""SGLang's HTTP side with its bootstrap rooms, faithful in what it demands and how it waits.

Prefill and decode meet in a room; without the other one a side waits (the real one for minutes,
this one for ever). A room is used once. Nothing waits for time to pass.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

from aiohttp import web

from support.mock_vllm import WORDS, error, send, serve_engine, whole


class RoomFailed(Exception):
    pass


@dataclass
class Room:
    decode_here: asyncio.Event = field(default_factory=asyncio.Event)
    sent: asyncio.Event = field(default_factory=asyncio.Event)
    num_inside: int = 0


@dataclass
class Bootstrap:
    """The rooms of all prefill servers, by (host, port, room)."""

    rooms: dict[tuple[str, int, int], Room] = field(default_factory=dict)
    used: set[tuple[str, int, int, str]] = field(default_factory=set)

    @property
    def num_inside(self) -> int:
        return sum(room.num_inside for room in self.rooms.values())

    def enter(self, key: tuple[str, int, int], mode: str) -> Room:
        if (*key, mode) in self.used:
            raise RoomFailed(f"room {key} is used twice")
        self.used.add((*key, mode))
        room = self.rooms.setdefault(key, Room())
        room.num_inside += 1
        return room


@dataclass
class MockSglang:
    bootstrap: Bootstrap
    mode: Literal["prefill", "decode"]
    model: str = "engine-model"
    bootstrap_port: int = 8998
    url: str = ""
    cached_tokens: int = 5
    bodies: list[dict] = field(default_factory=list)
    fail_status: int | None = None
    fail_gate: asyncio.Event | None = None
    die_after_chunks: int | None = None
    death_gate: asyncio.Event | None = None
    prompt_gate: asyncio.Event | None = None
    answer_gate: asyncio.Event | None = None
    """Prefill's own HTTP answer waits for it, after the KV is sent."""
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    num_running: int = 0

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.num_running += 1
        self.arrived.set()
        rooms: list[Room] = []
        try:
            if body.get("model") != self.model:
                return error(404, "no such model")
            if self.fail_gate is not None:
                await self.fail_gate.wait()
            if self.fail_status is not None:
                return error(self.fail_status, "scripted failure")
            for key in self._room_keys(body):
                rooms.append(self.bootstrap.enter(key, self.mode))
            if self.mode == "prefill":
                return await self._prefill(body, rooms)
            return await self._decode(request, body, rooms)
        except RoomFailed as fault:
            return error(400, str(fault))
        except asyncio.CancelledError:
            self.aborted.set()
            raise
        finally:
            self.num_running -= 1
            for room in rooms:
                room.num_inside -= 1

    def _room_keys(self, body: dict) -> list[tuple[str, int, int]]:
        prompt = body.get("prompt")
        is_batch = isinstance(prompt, list) and not isinstance(prompt[0], int)
        size = (len(prompt) if is_batch else 1) * (body.get("n") or 1)
        given = [body.get(f"bootstrap_{name}") for name in ("host", "port", "room")]
        if size == 1:
            given = [[one] for one in given]
        if not all(isinstance(one, list) and len(one) == size for one in given):
            raise RoomFailed("the bootstrap fields do not fit the batch")
        keys = list(zip(*given, strict=True))
        for host, port, room in keys:
            if not isinstance(host, str) or not isinstance(port, int):
                raise RoomFailed("no bootstrap address")
            if not isinstance(room, int) or not 0 <= room < 2**63:
                raise RoomFailed("no such room")
            if self.mode == "prefill" and port != self.bootstrap_port:
                raise RoomFailed("another server's port")
        return keys

    async def _prefill(self, body: dict, rooms: list[Room]) -> web.Response:
        for room in rooms:
            await room.decode_here.wait()
        if self.prompt_gate is not None:
            await self.prompt_gate.wait()
        for room in rooms:
            room.sent.set()
        if self.answer_gate is not None:
            await self.answer_gate.wait()
        details = {"cached_tokens": self.cached_tokens}
        usage = {"prompt_tokens": 40, "completion_tokens": 1, "prompt_tokens_details": details}
        return web.json_response({"id": "p", "choices": [], "usage": usage})

    async def _decode(
        self, request: web.Request, body: dict, rooms: list[Room]
    ) -> web.StreamResponse:
        chat = request.path.endswith("chat/completions")
        for room in rooms:
            room.decode_here.set()
        stream = bool(body.get("stream"))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if stream:
            # The real one answers 200 before it has anything.
            await response.prepare(request)
        for room in rooms:
            await room.sent.wait()
        usage = {
            "prompt_tokens": 40,
            "completion_tokens": len(WORDS),
            "prompt_tokens_details": {"cached_tokens": 39},
        }
        head = {"id": "own", "object": "x", "model": self.model}
        if not stream:
            choices = [whole(chat, i, "".join(WORDS), "stop") for i in range(len(rooms))]
            return web.json_response({**head, "choices": choices, "usage": usage})
        for number, word in enumerate(WORDS):
            if self.die_after_chunks == number:
                if self.death_gate is not None:
                    await self.death_gate.wait()
                assert request.transport is not None
                request.transport.abort()
                return response
            for i in range(len(rooms)):
                text = {"delta": {"content": word}} if chat else {"text": word}
                await send(response, {**head, "choices": [{"index": i, **text}]})
        if (body.get("stream_options") or {}).get("include_usage"):
            await send(response, {**head, "choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()


@asynccontextmanager
async def mock_sglang(
    bootstrap: Bootstrap, mode: Literal["prefill", "decode"], **settings: object
) -> AsyncIterator[MockSglang]:
    engine = MockSglang(bootstrap, mode, **settings)  # type: ignore[arg-type]
    async with serve_engine(engine) as url:
        engine.url = url
        yield engine
