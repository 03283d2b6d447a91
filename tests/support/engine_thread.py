"""Mock engines on a thread of their own, for tests whose gateway is another process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass

from support.mock_sglang import Bootstrap, MockSglang, mock_sglang
from support.mock_vllm import Fabric, MockVllm, mock_vllm


@dataclass
class EngineThread:
    """What the test's own thread may look at; changes go through `call`."""

    loop: asyncio.AbstractEventLoop
    fabric: Fabric
    vllm: list[MockVllm]
    sglang: list[MockSglang]

    def call(self, change: Callable[[], object]) -> None:
        done = threading.Event()
        self.loop.call_soon_threadsafe(lambda: (change(), done.set()))
        assert done.wait(10)


@contextmanager
def engine_thread(num_vllm: int) -> Iterator[EngineThread]:
    """Serve vLLM engines, and one SGLang pair."""
    started: list[EngineThread] = []
    ready = threading.Event()
    ending: list[asyncio.Event] = []

    async def main() -> None:
        async with AsyncExitStack() as stack:
            fabric, rooms = Fabric(), Bootstrap()
            vllm = [await stack.enter_async_context(mock_vllm(fabric)) for _ in range(num_vllm)]
            pair = [
                await stack.enter_async_context(mock_sglang(rooms, "prefill", bootstrap_port=9001)),
                await stack.enter_async_context(mock_sglang(rooms, "decode")),
            ]
            ending.append(asyncio.Event())
            started.append(EngineThread(asyncio.get_running_loop(), fabric, vllm, pair))
            ready.set()
            await ending[0].wait()

    thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    thread.start()
    assert ready.wait(20), "the engines did not start"
    try:
        yield started[0]
    finally:
        started[0].loop.call_soon_threadsafe(ending[0].set)
        thread.join(20)
