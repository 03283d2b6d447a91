"""The mixed load of the soak test, and the check of every answer. Counts; judges nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from dataclasses import dataclass, field

from twinfire.bench.client import Client
from twinfire.bench.load_metrics import ttft_ms
from twinfire.bench.prompt_source import PromptSource, library_paragraphs
from twinfire.bench.request import Api, GenerationRequest, Message
from twinfire.bench.request_record import RequestRecord
from twinfire.bench.stream_events import StreamFault, TextDelta

MAX_FAULTS_KEPT = 50


@dataclass
class Counts:
    answered: int = 0
    disconnected: int = 0
    output_tokens: int = 0
    by_kind: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    num_faults: int = 0
    ttfts_ms: list[float] = field(default_factory=list)

    def fault(self, text: str) -> None:
        self.num_faults += 1
        if len(self.faults) < MAX_FAULTS_KEPT:
            self.faults.append(text)

    def check(self, kind: str, record: RequestRecord) -> None:
        self.answered += 1
        self.by_kind[kind] += 1
        self.output_tokens += record.output_tokens
        if (first_ms := ttft_ms(record)) is not None:
            self.ttfts_ms.append(first_ms)
        for problem in problems_of(record):
            self.fault(f"{kind}: {problem}")


def problems_of(record: RequestRecord) -> list[str]:
    """Return what is wrong with an answer that was read to its end."""
    if record.error_kind is not None:
        return [f"{record.error_kind}: {record.error_message}"]
    problems = []
    if record.finish_reason not in ("stop", "length"):
        problems.append(f"finish_reason {record.finish_reason}")
    if record.completion_tokens is None or not record.prompt_tokens:
        problems.append("no usage")
    elif record.completion_tokens != record.token_ids_seen:
        problems.append(f"usage {record.completion_tokens}, received {record.token_ids_seen} ids")
    elif record.finish_reason == "length" and record.completion_tokens != record.max_tokens:
        problems.append(f"length after {record.completion_tokens} of {record.max_tokens} tokens")
    return problems


class Load:
    """Lanes that send requests of every kind, one after the other, until told to stop."""

    def __init__(self, clients: dict[Api, Client], counts: Counts, seed: int, leave: float) -> None:
        self._clients = clients
        self._counts = counts
        self._seed = seed
        self._leave_share = leave
        self._paragraphs = library_paragraphs()
        self.stopping = asyncio.Event()

    async def lane(self, number: int) -> None:
        choose = random.Random(f"{self._seed}/{number}")
        source = PromptSource(self._paragraphs, f"{self._seed}/{number}")
        shared = PromptSource(self._paragraphs, self._seed).take(3000)
        history: list[Message] = []
        while not self.stopping.is_set():
            kind = choose.choice(("short", "short", "long", "prefix", "turn", "completion"))
            if kind == "turn" and len(history) > 8:
                history.clear()
            request = make_request(kind, choose, source, shared, history, f"soak-{number}")
            client = self._clients["completions" if kind == "completion" else "chat"]
            if choose.random() < self._leave_share:
                await self._leave_early(client, request, choose.randint(0, 12))
                history.clear()
                continue
            record = await client.measure(request)
            self._counts.check(kind, record)
            if kind == "turn" and record.completed:
                history += [*request.messages[-1:], Message("assistant", record.answer)]

    async def _leave_early(
        self, client: Client, request: GenerationRequest, after_texts: int
    ) -> None:
        """Close the connection after so many texts; 0 leaves before the answer begins."""
        self._counts.disconnected += 1
        if after_texts == 0:
            task = asyncio.create_task(client.measure(request))
            # One turn of the loop sends nothing yet; a short while does.
            await asyncio.wait([task], timeout=0.05)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            return
        try:
            async with contextlib.aclosing(client.stream(request)) as stream:
                async for _, event in stream:
                    after_texts -= isinstance(event, TextDelta)
                    if after_texts <= 0:
                        return
        except StreamFault as error:
            self._counts.fault(f"before a disconnect: {error}")


def make_request(
    kind: str,
    choose: random.Random,
    source: PromptSource,
    shared: str,
    history: list[Message],
    session: str,
) -> GenerationRequest:
    sizes = {"long": choose.randint(4000, 9000), "completion": 400, "prefix": 100, "turn": 300}
    user = Message("user", source.take(sizes.get(kind, choose.randint(40, 800))))
    leading = {"prefix": [Message("system", shared)], "turn": history}.get(kind, [])
    return GenerationRequest(
        messages=(*leading, user),
        max_tokens=choose.choice((1, 8, 32, 96, 200)),
        ignore_eos=choose.random() < 0.5,
        temperature=choose.choice((0.0, 0.7, 1.0)),
        session=session if kind == "turn" else None,
        label=kind,
    )
