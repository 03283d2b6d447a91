"""All prompts of one HTTP request, from token events of the backend to text of choices.

Submits, merges what comes, applies stop strings and cancels what is no longer wanted: a choice
whose stop string came, and everything when its consumer goes away.
"""

from __future__ import annotations

import asyncio
import secrets
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import ParamSpec, Protocol, TypeVar

import msgspec

from twinfire.gateway.backends.backend import Backend, Event, Generation
from twinfire.gateway.backends.request_context import NO_CONTEXT, RequestContext
from twinfire.gateway.backends.route_record import RouteRecord
from twinfire.gateway.errors import GenerationFailed
from twinfire.gateway.request_meter import RequestMeter
from twinfire.gateway.text.choice_text import ChoiceText, TextDelta, TextOptions
from twinfire.gateway.text.token_logprobs import TokenLogprob, unpack_logprobs
from twinfire.gateway.text.vocabulary import Vocabulary
from twinfire.protocol.errors import DeadlineExceeded, Overloaded, TwinfireError, WorkerLost
from twinfire.protocol.messages import ChoiceDelta, PromptDone
from twinfire.protocol.sampling import SamplingParams

_INLINE_ROWS = 1024
"""Handling this many log-probabilities takes about a millisecond."""

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """What a dialect wants computed."""

    prompts: Sequence[array[int]]
    sampling: Sequence[SamplingParams]
    """One per prompt, alike but for bounds and drawn seeds."""
    text: TextOptions
    priority: int = 0
    cache_salt: str = ""
    prediction: bytes = b""
    """What the client expects as output (u32 ids); the answer is the same without it."""
    context: RequestContext = NO_CONTEXT

    @property
    def n(self) -> int:
        """Choices per prompt."""
        return self.sampling[0].n


@dataclass(frozen=True, slots=True)
class PromptReady:
    """A prompt has been computed; comes before the text of its choices."""

    prompt_index: int
    logprobs: Sequence[TokenLogprob | None] | None
    """One per prompt token, None for the first; None when not asked for."""
    embedding: bytes = b""
    """The prompt's pooled hidden state as f32; empty where none was asked for."""

    @property
    def num_rows(self) -> int:
        """How many log-probabilities there are."""
        return 0 if self.logprobs is None else len(self.logprobs)


class TextSink(Protocol):
    """Whoever can take text the moment it comes, without a task waking up for each piece."""

    def is_ready(self) -> bool:
        """Whether `take` may be called now; what comes meanwhile is iterated."""
        ...

    def take(self, delta: TextDelta) -> None:
        """Handle more text of a choice."""
        ...


class TextGeneration:
    """One request's text. `events` is iterated once; `meter` holds its counts at any time."""

    def __init__(
        self, backend: Backend, vocabulary: Vocabulary, job: GenerationJob, meter: RequestMeter
    ) -> None:
        self.meter = meter
        self._backend = backend
        self._job = job
        self._choices = [
            ChoiceText(prompt_index * job.n + choice, vocabulary, prompt, job.text)
            for prompt_index, prompt in enumerate(job.prompts)
            for choice in range(job.n)
        ]
        self._generations: list[Generation] = []
        self._sink: TextSink | None = None
        self._num_unfinished = len(self._choices)
        self._iterating = False
        """Whether an event that was iterated is still being handled."""

    @property
    def route(self) -> RouteRecord | None:
        """How the first prompt is served; None where there was nothing to choose."""
        return self._generations[0].record if self._generations else None

    async def events(self, sink: TextSink) -> AsyncGenerator[PromptReady | TextDelta, None]:
        """Yield what `sink` does not take, until every choice has finished.

        Leaving early cancels the rest.
        """
        try:
            self._submit()
            if len(self._generations) == 1:
                self._sink = sink
                self._generations[0].offer_to(self._take)
            async with aclosing(_merge(self._generations)) as merged:
                async for prompt_index, event in merged:
                    self._iterating = True
                    if isinstance(event, PromptDone):
                        yield await self._prompt_ready(prompt_index, event)
                    elif (delta := self._text_of(prompt_index, event)) is not None:
                        yield delta
                    if not self._num_unfinished:
                        break
                    self._iterating = False
            if self._num_unfinished:
                raise WorkerLost("the worker ended the request before it was complete")
            self.meter.request_finished()
        except Overloaded:
            self.meter.rejected()
            raise
        finally:
            if self._num_unfinished:
                self.meter.aborted(self._num_unfinished)
            for generation in self._generations:
                generation.cancel()

    def _take(self, event: Event) -> bool:
        """Give the sink the text of an event, unless something has to be awaited for it."""
        sink = self._sink
        assert sink is not None, "nothing was offered before there was a sink"
        if self._iterating or not isinstance(event, ChoiceDelta) or not sink.is_ready():
            return False
        delta = self._text_of(0, event)
        if delta is not None:
            sink.take(delta)
        return True

    def _text_of(self, prompt_index: int, event: ChoiceDelta) -> TextDelta | None:
        """Return what a choice gained; None when it had finished already."""
        choice = self._choices[prompt_index * self._job.n + event.choice]
        if choice.finished:
            return None
        if event.finish_reason in ("error", "cancelled", "timeout"):
            raise _failure(event.finish_reason)
        num_before = choice.num_output_tokens
        delta = choice.feed(event)
        self.meter.tokens(delta.index, delta.num_output_tokens)
        if event.drafted:
            # A stop string may have cut off tokens that the worker accepted.
            num_gained = delta.num_output_tokens - num_before
            self.meter.drafts(event.drafted, min(event.accepted, num_gained))
        if delta.finish_reason is not None:
            self._num_unfinished -= 1
            self.meter.choice_finished(delta.index, delta.finish_reason)
            if event.finish_reason is None:
                self._generations[prompt_index].cancel(event.choice)
        return delta

    def _submit(self) -> None:
        job = self._job
        self.meter.submitted(job.sampling[0].max_tokens)
        for prompt, sampling in zip(job.prompts, job.sampling, strict=True):
            self._generations.append(
                self._backend.submit(
                    prompt,
                    sampling,
                    priority=job.priority,
                    cache_salt=job.cache_salt,
                    context=job.context,
                )
            )

    async def _prompt_ready(self, prompt_index: int, event: PromptDone) -> PromptReady:
        record = self._generations[prompt_index].record
        self.meter.prompt_done(prompt_index, event, record.first_token if record else None)
        if event.prompt_logprobs is None:
            return PromptReady(prompt_index, None, event.embedding)
        scored = self._job.prompts[prompt_index][1:]
        rows = await off_loop(len(scored), unpack_logprobs, scored, event.prompt_logprobs)
        return PromptReady(prompt_index, [None, *rows])


def with_drawn_seeds(
    sampling: SamplingParams, count: int, seed_given: bool
) -> list[SamplingParams]:
    """Return `count` copies, each with a seed of its own unless the client gave one."""
    if seed_given:
        return [sampling] * count
    return [msgspec.structs.replace(sampling, seed=secrets.randbits(63)) for _ in range(count)]


async def off_loop(num_rows: int, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run `work` over `num_rows` log-probabilities, on a thread when they are many."""
    if num_rows <= _INLINE_ROWS:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


async def _merge(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, Event], None]:
    """Yield (index of the generation, event) as they come."""
    if len(generations) == 1:
        async for event in generations[0]:
            yield 0, event
        return
    queue: asyncio.Queue[tuple[int, Event] | Exception | None] = asyncio.Queue()

    async def pump(index: int, events: AsyncIterator[Event]) -> None:
        try:
            async for event in events:
                queue.put_nowait((index, event))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [
        asyncio.create_task(pump(index, aiter(generation)))
        for index, generation in enumerate(generations)
    ]
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if item is None:
                num_open -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _failure(reason: str) -> TwinfireError:
    if reason == "cancelled":
        return WorkerLost("the worker cancelled the request")
    if reason == "timeout":
        return DeadlineExceeded("the request's time was over before it was complete")
    return GenerationFailed("the engine failed to compute the request")
