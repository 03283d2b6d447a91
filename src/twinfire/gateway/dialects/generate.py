"""The part that both generating endpoints share: driving a generation into an answer.

A dialect gives a writer; this file streams or collects through it, and counts the usage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from twinfire.accounts.prices import NANOS
from twinfire.gateway.accounting.accounting import tenant_salt
from twinfire.gateway.dialects.request_headers import request_context, show_route
from twinfire.gateway.dialects.requests import SamplingFields
from twinfire.gateway.dialects.responses import (
    CompletionTokensDetails,
    PromptTokensDetails,
    Usage,
)
from twinfire.gateway.exchange import Exchange, is_header_safe
from twinfire.gateway.gateway import Gateway
from twinfire.gateway.hosted_model import ReadyModel
from twinfire.gateway.request_meter import RequestMeter
from twinfire.gateway.settings import RequestLimits
from twinfire.gateway.text.choice_text import ClientFinish, ShownToken, TextDelta
from twinfire.gateway.text.token_logprobs import TokenLogprob
from twinfire.gateway.text_generation import (
    GenerationJob,
    PromptReady,
    TextGeneration,
    TextSink,
    off_loop,
)
from twinfire.protocol.errors import InvalidRequest

PromptRows = Sequence[TokenLogprob | None]
"""One per prompt token, None for the first."""


@dataclass(slots=True)
class CollectedChoice:
    """All of one choice."""

    pieces: list[str] = field(default_factory=list)
    tokens: list[ShownToken] = field(default_factory=list)
    finish_reason: ClientFinish = "length"
    stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.pieces)

    @property
    def token_ids(self) -> list[int]:
        """The tokens that are shown."""
        return [token.token_id for token in self.tokens]


@dataclass(slots=True)
class CollectedAnswer:
    """All of a generation."""

    choices: list[CollectedChoice]
    prompt_logprobs: list[PromptRows | None]
    usage: Usage

    @property
    def num_prompt_rows(self) -> int:
        """Prompt tokens whose log-probabilities have to be written."""
        return sum(len(rows) for rows in self.prompt_logprobs if rows is not None)


class StreamWriter(Protocol):
    """Writes a dialect's server-sent events."""

    def prompt_ready(self, ready: PromptReady) -> bytes:
        """Return what opens the choices of a prompt."""
        ...

    def delta(self, delta: TextDelta) -> bytes:
        """Return what a choice gained; empty when nobody would see a difference."""
        ...

    def end(self) -> bytes:
        """Return the closing events, without `[DONE]`."""
        ...


async def start_generation(
    gateway: Gateway,
    model: ReadyModel,
    exchange: Exchange,
    request: SamplingFields,
    job: GenerationJob,
) -> TextGeneration:
    """Return the job's generation; it is submitted when it is iterated.

    HttpError where the account may not have it: 402, 403 or 429.
    """
    exchange.generates = True
    lengths = [len(prompt) for prompt in job.prompts]
    max_tokens = sum(sampling.max_tokens * sampling.n for sampling in job.sampling)
    bill = await gateway.accounting.admit(exchange, model.name, sum(lengths), max_tokens)
    meter = RequestMeter(model.metrics, exchange.arrival_s, lengths, job.n)
    job = dataclasses.replace(
        job,
        context=dataclasses.replace(request_context(exchange, request), prediction=job.prediction),
        cache_salt=tenant_salt(exchange.account, job.cache_salt),
    )
    generation = TextGeneration(model.backend, model.text.vocabulary, job, meter)
    bill.follow(meter, lambda: generation.route)
    return generation


@asynccontextmanager
async def billed(exchange: Exchange) -> AsyncIterator[None]:
    """Commit the record of what is computed inside, or book what was seen of it by a fault."""
    try:
        yield
        if exchange.bill is not None:
            await exchange.bill.settle()
    except BaseException as error:
        exchange.close_bill(error)
        raise


async def stream(
    exchange: Exchange,
    generation: TextGeneration,
    writer: StreamWriter,
    *,
    done_event: bool = True,
) -> None:
    """Answer with an event stream, which ends with `[DONE]` where the dialect has it."""
    exchange.allow_early_start()
    sink = _StreamSink(exchange, writer)
    async with billed(exchange), aclosing(generation.events(sink)) as events:
        async for event in events:
            if isinstance(event, PromptReady):
                show_route(exchange, generation.route)
                sink.pending += await off_loop(event.num_rows, writer.prompt_ready, event)
                continue
            frames = sink.pending + writer.delta(event)
            if event.finish_reason is not None:
                sink.pending = frames
            elif frames:
                await exchange.send_events(frames)
                sink.pending = b""
    await exchange.end_events(sink.pending + writer.end(), done_event=done_event)


class _StreamSink:
    """Writes text to the client at once, where nothing has to be sent or awaited before it."""

    def __init__(self, exchange: Exchange, writer: StreamWriter) -> None:
        self._exchange = exchange
        self._writer = writer
        self.pending = b""
        """Events that go out with the next text, or at the end."""

    def is_ready(self) -> bool:
        """Whether text may be written now."""
        return not self.pending and self._exchange.takes_events()

    def take(self, delta: TextDelta) -> None:
        """Write what the choice gained."""
        frames = self._writer.delta(delta)
        if delta.finish_reason is not None:
            # A client may take this for the end, and the end comes after the usage's commit.
            self.pending = frames
        elif frames:
            self._exchange.write_events(frames)


async def collect(
    exchange: Exchange, generation: TextGeneration, num_prompts: int, num_choices: int
) -> CollectedAnswer:
    """Wait for everything."""
    sink = _CollectingSink(num_choices)
    prompt_logprobs = await collect_into(sink, exchange, generation, num_prompts)
    return CollectedAnswer(sink.choices, prompt_logprobs, usage_of(generation.meter))


async def collect_into(
    sink: TextSink, exchange: Exchange, generation: TextGeneration, num_prompts: int
) -> list[PromptRows | None]:
    """Give all text to `sink`; return each prompt's log-probabilities, None if not asked for."""
    prompt_logprobs: list[PromptRows | None] = [None] * num_prompts
    async with billed(exchange), aclosing(generation.events(sink)) as events:
        async for event in events:
            if isinstance(event, PromptReady):
                show_route(exchange, generation.route)
                prompt_logprobs[event.prompt_index] = event.logprobs
            else:
                sink.take(event)
    return prompt_logprobs


class _CollectingSink:
    """Keeps all text."""

    def __init__(self, num_choices: int) -> None:
        self.choices = [CollectedChoice() for _ in range(num_choices)]

    def is_ready(self) -> bool:
        """Always."""
        return True

    def take(self, delta: TextDelta) -> None:
        """Add what the choice gained."""
        choice = self.choices[delta.index]
        choice.pieces.append(delta.text)
        choice.tokens.extend(delta.tokens)
        if delta.finish_reason is not None:
            choice.finish_reason = delta.finish_reason
            choice.stop_reason = delta.stop_reason


def usage_of(meter: RequestMeter) -> Usage:
    """Return the usage of a whole request."""
    total = usage(
        meter.num_prompt_tokens,
        meter.num_output_tokens,
        meter.num_cached_tokens,
        meter.num_reasoning_tokens,
    )
    total.completion_tokens_details.accepted_prediction_tokens = meter.num_accepted_tokens
    total.completion_tokens_details.rejected_prediction_tokens = meter.num_rejected_tokens
    if meter.cost_nanos is not None:
        total.cost = meter.cost_nanos / NANOS
    return total


def usage(
    num_prompt_tokens: int,
    num_output_tokens: int,
    num_cached_tokens: int,
    num_reasoning_tokens: int = 0,
) -> Usage:
    """Return a usage object."""
    return Usage(
        prompt_tokens=num_prompt_tokens,
        total_tokens=num_prompt_tokens + num_output_tokens,
        completion_tokens=num_output_tokens,
        prompt_tokens_details=PromptTokensDetails(num_cached_tokens),
        completion_tokens_details=CompletionTokensDetails(num_reasoning_tokens),
    )


def wants_usage(request: SamplingFields) -> bool:
    """Whether a stream ends with its usage; empty options do not ask for it."""
    options = request.stream_options
    return options is not None and options.include_usage is True


def wants_continuous_usage(request: SamplingFields) -> bool:
    """Whether every event carries the usage so far."""
    options = request.stream_options
    return wants_usage(request) and options is not None and options.continuous_usage_stats is True


def answer_id(prefix: str, exchange: Exchange, request: SamplingFields) -> str:
    """Return the answer's id, after the client's request id where it gave one."""
    limit = exchange.settings.limits.max_request_id_chars
    if request.request_id:
        if len(request.request_id) > limit or not is_header_safe(request.request_id):
            raise InvalidRequest(
                f"`request_id` must be at most {limit} printable ASCII characters.", "request_id"
            )
        exchange.request_id = exchange.client_request_id or request.request_id
        return prefix + request.request_id
    return prefix + exchange.request_id


def checked_cache_salt(request: SamplingFields, limits: RequestLimits) -> str:
    """Return the salt of the prefix cache, "" for none."""
    salt = request.cache_salt
    if salt is None:
        return ""
    if not 0 < len(salt) <= limits.max_cache_salt_chars:
        raise InvalidRequest(
            f"`cache_salt` must have 1 to {limits.max_cache_salt_chars} characters, "
            f"got {len(salt)}.",
            "cache_salt",
        )
    return salt
