"""What both ways of splitting a request over two engines share.

A `SplitAnswer` is a decode leg that has said 200, with the prompt's leg beside it where that may
still fail: the two are raced, so that the failure of one never leaves the other waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from twinfire.gateway.external.engine_server import EnginePool, EngineServer
from twinfire.gateway.external.external_job import ExternalJob
from twinfire.gateway.external.leg import EngineClient, FaultKind, Leg, LegFailed

T = TypeVar("T")


@dataclass(slots=True)
class ExternalTallies:
    """Counts since the start, of one model."""

    requests: int = 0
    split: int = 0
    """Answers whose prompt another engine computed."""
    retries: int = 0
    released: int = 0
    """Prompts whose KV nobody wanted any more and that were given back."""
    broken_streams: int = 0
    """Answers that ended with an error after their first byte."""
    left: int = 0
    """Clients that did not wait for the end."""


@dataclass(slots=True)
class Engines:
    """Everything that a flow sends requests with."""

    client: EngineClient
    prefill: EnginePool
    decode: EnginePool
    tallies: ExternalTallies = field(default_factory=ExternalTallies)

    def decode_leg(self, job: ExternalJob, server: EngineServer) -> Leg:
        """Charge an answer to `server`: the prompt's KV and what will follow it."""
        return Leg(self.client, self.decode, server, job.num_prompt_tokens + job.max_tokens)

    def prefill_leg(self, job: ExternalJob, server: EngineServer) -> Leg:
        """Charge a prompt to `server`."""
        return Leg(self.client, self.prefill, server, job.num_prompt_tokens)


class Attempts:
    """What one request has tried, and the last fault it met."""

    def __init__(self) -> None:
        self.excluded: set[EngineServer] = set()
        self.last: LegFailed | None = None

    def failed(self, leg: Leg, failure: LegFailed) -> None:
        """Remember a fault; raise it when no other server would do better."""
        if failure.kind is FaultKind.REFUSED:
            raise failure
        self.excluded.add(leg.server)
        self.last = failure

    def nobody(self, stage: str) -> LegFailed:
        """Return the fault of having nobody left to ask."""
        if self.last is not None:
            return self.last
        message = f"No {stage} engine can take the request now."
        return LegFailed(FaultKind.OVERLOADED, 503, message, code="no_engine")


class SplitAnswer:
    """An answer under way; `prefill_server` computed its prompt, None for the decode leg's own.

    `cached_tokens` is the prefill engine's count, once known.
    """

    def __init__(
        self,
        decode: Leg,
        *,
        prefill_server: EngineServer | None = None,
        cached_tokens: int | None = None,
        prefill: asyncio.Task[int | None] | None = None,
    ) -> None:
        self.decode = decode
        self.prefill_server = prefill_server
        self._cached_tokens = cached_tokens
        self._prefill = prefill

    @property
    def is_split(self) -> bool:
        """Whether two engines answer."""
        return self.prefill_server is not None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that the prefill engine had, None while or where it does not say."""
        prefill = self._prefill
        if prefill is None or not prefill.done() or prefill.cancelled() or prefill.exception():
            return self._cached_tokens
        return prefill.result()

    async def read_piece(self, *, is_first: bool) -> bytes:
        """Return the next piece, b"" at the end. The prompt can fail only before the first."""
        reading = self.decode.read_piece()
        return await (self._raced(reading) if is_first else reading)

    async def read_all(self) -> bytes:
        """Return the whole answer of the decode leg."""
        return await self._raced(self.decode.read_all())

    async def settle_prefill(self, limit_s: float) -> None:
        """Let the prompt's own answer arrive, as it does about when its first token does."""
        if self._prefill is not None:
            await asyncio.wait({self._prefill}, timeout=limit_s)

    def close(self) -> None:
        """End both legs."""
        self.decode.close()
        if self._prefill is not None:
            self._prefill.cancel()

    async def _raced(self, reading: Awaitable[T]) -> T:
        if self._prefill is None:
            return await reading
        return await race(reading, self._prefill)


async def race(work: Awaitable[T], guard: asyncio.Task[int | None]) -> T:
    """Await `work`, cancelled as soon as `guard` fails, whose exception is then raised.

    Cancels `guard` never: it may be needed after `work`.
    """
    task = asyncio.ensure_future(work)
    task.add_done_callback(note_outcome)
    try:
        await asyncio.wait({task, guard}, return_when=asyncio.FIRST_COMPLETED)
        # A guard that succeeded says nothing of the work; one that failed explains it.
        if guard.done() and guard.exception() is not None:
            guard.result()
        return await task
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def note_outcome(task: asyncio.Future[Any]) -> None:
    """Done-callback of a task whose fault nobody may be left to hear of."""
    if not task.cancelled():
        task.exception()


class Flow(Protocol):
    """One way to get a request answered."""

    def unready_reason(self) -> str | None:
        """Why no request can be answered now, None when one can."""
        ...

    async def start(self, job: ExternalJob, attempts: Attempts) -> SplitAnswer:
        """Return an answer whose prompt, where it is a leg of its own, is safe. LegFailed."""
        ...

    async def close(self) -> None:
        """End what goes on in the background."""
        ...


class PlainFlow:
    """Engines that do both stages."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines

    def unready_reason(self) -> str | None:
        """Say that nobody is there."""
        return None if self._engines.decode.has_available() else "no engine is healthy"

    async def start(self, job: ExternalJob, attempts: Attempts) -> SplitAnswer:
        """Ask the engine with the fewest tokens, then the others."""
        return SplitAnswer(await open_alone(self._engines, self._engines.decode, job, attempts))

    async def close(self) -> None:
        """Nothing is left behind."""


async def open_alone(
    engines: Engines, pool: EnginePool, job: ExternalJob, attempts: Attempts
) -> Leg:
    """Return a leg that does the whole request, on the first server of `pool` that takes it."""
    while (server := pool.choose(attempts.excluded, job.session)) is not None:
        leg = Leg(engines.client, pool, server, job.num_prompt_tokens + job.max_tokens)
        try:
            await leg.open(job.path, job.body, job.request_id)
        except LegFailed as failure:
            leg.close()
            attempts.failed(leg, failure)
        except BaseException:
            leg.close()
            raise
        else:
            return leg
    raise attempts.nobody("decode")
