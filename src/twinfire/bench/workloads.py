"""When each request of a built workload starts, and what is recorded of it.

A workload holds finished prompts, so running it twice, or against two servers, sends the same
bytes. Owns concurrency and arrival times; knows nothing of how prompts were made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from twinfire.bench.client import Client
from twinfire.bench.request import GenerationRequest, Message
from twinfire.bench.request_record import RequestRecord

OnRecord = Callable[[RequestRecord], None]


class Phase(msgspec.Struct, frozen=True):
    """The records of one part of a run."""

    name: str
    records: tuple[RequestRecord, ...]
    window_s: tuple[float, float] | None = None
    """Clock readings between which gaps count as ITL; None counts all."""


class Workload(Protocol):
    """Something that can be run against a server, any number of times."""

    @property
    def num_requests(self) -> int:
        """Requests that a run sends, about."""
        ...

    async def run(self, client: Client, on_record: OnRecord) -> list[Phase]:
        """Send everything and return what was seen; `on_record` gets each record at once."""
        ...


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """`concurrency` requests at any time until all were sent."""

    name: str
    requests: Sequence[GenerationRequest]
    concurrency: int

    @property
    def num_requests(self) -> int:
        """Every request once."""
        return len(self.requests)

    async def run(self, client: Client, on_record: OnRecord) -> list[Phase]:
        """Send the requests in order."""
        waiting = iter(self.requests)
        records: list[RequestRecord] = []

        async def lane() -> None:
            for request in waiting:
                record = await client.measure(request)
                records.append(record)
                on_record(record)

        async with asyncio.TaskGroup() as group:
            for _ in range(self.concurrency):
                group.create_task(lane())
        return [Phase(self.name, tuple(records))]


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Each request at its own time, whatever the server does meanwhile."""

    name: str
    arrivals: Sequence[tuple[float, GenerationRequest]]
    """(seconds after the start, request) in order."""

    @property
    def num_requests(self) -> int:
        """Every request once."""
        return len(self.arrivals)

    async def run(self, client: Client, on_record: OnRecord) -> list[Phase]:
        """Send each request when it is due."""
        await client.model()
        loop = asyncio.get_running_loop()
        start_s = loop.time()

        async def one(request: GenerationRequest) -> RequestRecord:
            record = await client.measure(request)
            on_record(record)
            return record

        tasks: list[asyncio.Task[RequestRecord]] = []
        async with asyncio.TaskGroup() as group:
            for offset_s, request in self.arrivals:
                await asyncio.sleep(max(start_s + offset_s - loop.time(), 0))
                tasks.append(group.create_task(one(request)))
        return [Phase(self.name, tuple(task.result() for task in tasks))]


@dataclass(frozen=True, slots=True)
class Sequential:
    """Workloads one after the other, each its own phase."""

    parts: Sequence[Workload]

    @property
    def num_requests(self) -> int:
        """Those of all parts."""
        return sum(part.num_requests for part in self.parts)

    async def run(self, client: Client, on_record: OnRecord) -> list[Phase]:
        """Run the parts in order."""
        phases: list[Phase] = []
        for part in self.parts:
            phases += await part.run(client, on_record)
        return phases


@dataclass(frozen=True, slots=True)
class Interference:
    """Decode streams run all the time while long prompts arrive.

    The first long prompt comes one interval after every stream has shown a token. A stream starts
    its next request when one ends, until the last long prompt is answered. ITL counts only inside
    the window from the first long prompt sent to the last one answered.
    """

    streams: Sequence[Sequence[GenerationRequest]]
    """For each stream, the requests it cycles through."""
    long_requests: Sequence[GenerationRequest]
    interval_s: float

    @property
    def num_requests(self) -> int:
        """Long prompts, and at least one request of each stream."""
        return len(self.long_requests) + len(self.streams)

    async def run(self, client: Client, on_record: OnRecord) -> list[Phase]:
        """Run until the long prompts are answered and the streams' last requests are over."""
        long_over = asyncio.Event()
        started = [asyncio.Event() for _ in self.streams]
        records: list[RequestRecord] = []

        async def stream(requests: Sequence[GenerationRequest], first_token: asyncio.Event) -> None:
            turn = 0
            while not long_over.is_set() or turn == 0:
                request = requests[turn % len(requests)]
                record = await client.measure(request, on_text=first_token.set)
                # A stream that fails at once must not hold back the others.
                first_token.set()
                records.append(record)
                on_record(record)
                turn += 1
                if not record.completed:
                    return

        async with asyncio.TaskGroup() as group:
            for requests, first_token in zip(self.streams, started, strict=True):
                group.create_task(stream(requests, first_token))
            for first_token in started:
                await first_token.wait()
            arrivals = [
                ((index + 1) * self.interval_s, request)
                for index, request in enumerate(self.long_requests)
            ]
            (long_phase,) = await OpenLoop("long", arrivals).run(client, on_record)
            long_over.set()
        window_s = (
            min(record.started_s for record in long_phase.records),
            max(record.ended_s for record in long_phase.records),
        )
        return [Phase("decode", tuple(records), window_s), long_phase]


@dataclass(frozen=True, slots=True)
class AgentSession:
    """One conversation whose history grows by the model's real answers."""

    session: str
    system: str
    user_turns: Sequence[str]
    output_tokens: int
    ignore_eos: bool = True


@dataclass(frozen=True, slots=True)
class Agents:
    """Several sessions at once, each turn sent after the one before was answered."""

    sessions: Sequence[AgentSession]
    think_s: float = 0.0
    """Pause between an answer and the next turn."""
    phase_names: Sequence[str] = field(default=("first turn", "later turns"))

    @property
    def num_requests(self) -> int:
        """Every turn of every session."""
        return sum(len(session.user_turns) for session in self.sessions)

    async def run(self, client: Client, on_record: OnRecord) -> list[Phase]:
        """Run all sessions; a session ends at its first failed turn."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._session(client, s, on_record)) for s in self.sessions]
        turns = [task.result() for task in tasks]
        first = tuple(records[0] for records in turns if records)
        later = tuple(record for records in turns for record in records[1:])
        parts = zip(self.phase_names, (first, later), strict=True)
        return [Phase(name, records) for name, records in parts if records]

    async def _session(
        self, client: Client, session: AgentSession, on_record: OnRecord
    ) -> list[RequestRecord]:
        messages = [Message("system", session.system)]
        records: list[RequestRecord] = []
        for index, text in enumerate(session.user_turns):
            if index:
                await asyncio.sleep(self.think_s)
            messages.append(Message("user", text))
            request = GenerationRequest(
                messages=tuple(messages),
                max_tokens=session.output_tokens,
                ignore_eos=session.ignore_eos,
                temperature=0.0,
                session=session.session,
                label=f"turn {index + 1}",
            )
            record = await client.measure(request)
            records.append(record)
            on_record(record)
            if not record.completed:
                break
            messages.append(Message("assistant", record.answer))
        return records
