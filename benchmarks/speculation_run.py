"""Tasks run against one server, what became of each request, and which tasks are of use at all.

No server process is ever asked the same thing twice: a tree of past outputs would know the answer.
Each life of a server takes every task once, and single stream and eight streams get tasks of
their own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import time
from collections import deque
from collections.abc import Sequence

import msgspec

from output_loops import loops, repeated_share
from speculation_tasks import Family, Task
from twinfire.bench.client import Client
from twinfire.bench.machine import ForeignCpu
from twinfire.bench.prometheus_text import metric_sum
from twinfire.bench.request import GenerationRequest, Message, prompt_text

SCREEN_STREAMS = 8
_PREFIXES = ("twinfire", "vllm")
_COUNTERS = ("spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total")


class Outcome(msgspec.Struct, frozen=True):
    """One request. Holds no text."""

    task: int
    turn: int
    seconds: float
    """From the request to the last piece of its answer."""
    decode_seconds: float
    """From the first piece to the last one."""
    prompt_tokens: int
    output_tokens: int
    loops: bool
    repeated: float
    """Share of the answer that stood in the input."""
    answer: str
    """A digest."""
    finish_reason: str
    accepted: int | None = None
    rejected: int | None = None
    """Guesses; None where the server does not tell of each request."""
    error: str | None = None


class ScenarioRun(msgspec.Struct, frozen=True):
    """One family of tasks at one number of streams, in one life of one server."""

    column: str
    round: int
    family: str
    streams: int
    foreign_cpu: float
    wall_s: float
    outcomes: list[Outcome]
    drafted: float
    accepted: float
    """Guesses of the whole run, by the server's counters."""


async def run_tasks(
    client: Client, column: str, index: int, family: Family, streams: int, tasks: Sequence[Task]
) -> ScenarioRun:
    """Give the tasks to so many clients, each of which takes the next when it is done."""
    waiting = deque(tasks)
    outcomes: list[Outcome] = []

    async def work(client: Client) -> None:
        while waiting:
            outcomes.extend(await run_task(client, waiting.popleft()))

    async with _client_of(family, client) as asking:
        before = await _guesses(client)
        foreign, started_s = ForeignCpu(), time.perf_counter()
        await asyncio.gather(*(work(asking) for _ in range(streams)))
        wall_s, foreign_cpu = time.perf_counter() - started_s, foreign.share()
        after = await _guesses(client)
    return ScenarioRun(
        column=column,
        round=index,
        family=family.name,
        streams=streams,
        foreign_cpu=foreign_cpu,
        wall_s=wall_s,
        outcomes=outcomes,
        drafted=after[0] - before[0],
        accepted=after[1] - before[1],
    )


def _client_of(family: Family, client: Client) -> Client:
    return Client(dataclasses.replace(client.target, api=family.api))


async def run_task(client: Client, task: Task) -> list[Outcome]:
    """Return what became of each turn; the first fault ends the conversation."""
    messages: list[Message] = []
    outcomes: list[Outcome] = []
    for turn, text in enumerate(task.turns):
        messages.append(Message("user", text))
        record = await client.measure(
            GenerationRequest(
                tuple(messages),
                task.max_tokens,
                ignore_eos=task.ignore_eos,
                temperature=task.temperature,
                seed=task.number,
                more=task.more,
            )
        )
        given = prompt_text(tuple(messages))
        first_s = record.chunk_times_s[0] if record.chunk_times_s else record.last_s
        outcomes.append(
            Outcome(
                task=task.number,
                turn=turn,
                seconds=record.last_s - record.started_s,
                decode_seconds=record.last_s - first_s,
                prompt_tokens=record.prompt_tokens or 0,
                output_tokens=record.output_tokens,
                loops=loops(given, record.answer),
                repeated=repeated_share(given, record.answer),
                answer=hashlib.sha256(record.answer.encode()).hexdigest()[:16],
                finish_reason=record.finish_reason or "",
                accepted=record.accepted_tokens,
                rejected=record.rejected_tokens,
                error=record.error_kind and f"{record.error_kind}: {record.error_message}",
            )
        )
        if not record.completed:
            break
        messages.append(Message("assistant", record.answer))
    return outcomes


class Screening(msgspec.Struct, frozen=True):
    """Which candidates of a family are of use with one format of weights."""

    checksum: str
    """Of all candidates: another Python has other ones."""
    kept: list[int]
    tried: int
    looping: int
    not_done: int
    """Answers without the work: too short, or an edit that leaves the file out."""


def checksum_of(tasks: Sequence[Task]) -> str:
    """Return a digest of what is asked."""
    return hashlib.sha256(msgspec.json.encode(list(tasks))).hexdigest()[:16]


async def screen(client: Client, family: Family, tasks: Sequence[Task], wanted: int) -> Screening:
    """Try candidates in their order, without speculation, until `wanted` are of use."""
    kept: list[int] = []
    tried = looping = not_done = 0
    async with _client_of(family, client) as asking:
        for start in range(0, len(tasks), SCREEN_STREAMS):
            some = tasks[start : start + SCREEN_STREAMS]
            tried += len(some)
            for outcomes in await asyncio.gather(*(run_task(asking, task) for task in some)):
                if any(outcome.loops for outcome in outcomes):
                    looping += 1
                elif all(does_work(family, outcome) for outcome in outcomes):
                    kept.append(outcomes[0].task)
                else:
                    not_done += 1
            if len(kept) >= wanted:
                break
    return Screening(checksum_of(tasks), kept, tried, looping, not_done)


def does_work(family: Family, outcome: Outcome) -> bool:
    """Return whether the answer is the work that was asked for."""
    return (
        outcome.error is None
        and outcome.output_tokens >= family.least_tokens
        and outcome.repeated >= family.least_repeated
    )


async def _guesses(client: Client) -> tuple[float, float]:
    page = (await client.get(client.target.root + "/metrics") or b"").decode()
    totals = [
        sum(metric_sum(page, f"{prefix}:{name}") or 0.0 for prefix in _PREFIXES)
        for name in _COUNTERS
    ]
    return totals[0], totals[1]
