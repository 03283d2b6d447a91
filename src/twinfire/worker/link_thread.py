"""The event loop of a worker's links, on its own thread, so that the engine waits for nobody."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

CALL_LIMIT_S = 10.0


class LinkThread:
    """Runs a loop from `start` to `stop`."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="links", daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def call(self, function: Callable[[], None]) -> None:
        """Call `function` on the loop, in order with other calls; from any other thread."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(function)

    def result(self, coroutine: Coroutine[Any, Any, T], limit_s: float = CALL_LIMIT_S) -> T:
        """Run a coroutine on the loop and wait for what it returns or raises."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(limit_s)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin a task that is cancelled with the loop; on the loop only."""
        task = self.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def stop(self) -> None:
        """End all tasks and the loop."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(CALL_LIMIT_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        for task in self._tasks:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        self.loop.close()
