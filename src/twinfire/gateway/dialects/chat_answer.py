"""A chat request driven into an answer: streamed through a dialect's writer, or collected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from twinfire.gateway.dialects.chat_job import ChatJob
from twinfire.gateway.dialects.generate import collect_into, start_generation, stream, usage_of
from twinfire.gateway.dialects.responses import Usage
from twinfire.gateway.exchange import Exchange
from twinfire.gateway.request_meter import RequestMeter
from twinfire.gateway.text.answer_parts import (
    AnswerDelta,
    AnswerFinish,
    ContentText,
    ReasoningText,
    ToolCallArguments,
    ToolCallStart,
)
from twinfire.gateway.text.answer_splitter import AnswerSplitter
from twinfire.gateway.text.choice_text import ShownToken, TextDelta
from twinfire.gateway.text.token_logprobs import TokenLogprob
from twinfire.gateway.text_generation import PromptReady


class AnswerWriter(Protocol):
    """Writes the server-sent events of one stream in a dialect."""

    def prompt_ready(self, ready: PromptReady, usage: Usage) -> bytes:
        """Return what opens the choices; `usage` has the prompt's tokens, none of the output."""
        ...

    def delta(self, delta: AnswerDelta) -> bytes:
        """Return what a choice gained; empty when nobody would see a difference."""
        ...

    def end(self, usage: Usage) -> bytes:
        """Return the closing events, without `[DONE]`."""
        ...


async def stream_chat(
    exchange: Exchange, job: ChatJob, writer: AnswerWriter, *, done_event: bool = True
) -> None:
    """Answer with an event stream; `done_event` ends it with `data: [DONE]`."""
    generation = await start_generation(
        job.gateway, job.model, exchange, job.request, job.generation
    )
    parts = _PartWriter(writer, _Parts(job, generation.meter))
    await stream(exchange, generation, parts, done_event=done_event)


class _Parts:
    """Makes parts of the text that comes."""

    def __init__(self, job: ChatJob, meter: RequestMeter) -> None:
        self.meter = meter
        self._splitters: list[AnswerSplitter] | None = None
        if job.plan is not None:
            self._splitters = [AnswerSplitter(job.plan) for _ in range(job.n)]

    def of(self, delta: TextDelta) -> AnswerDelta:
        """Return what a choice gained."""
        if self._splitters is None:
            return AnswerDelta(
                delta.index,
                (ContentText(delta.text),) if delta.text else (),
                delta.tokens,
                delta.finish_reason,
                delta.stop_reason,
                delta.num_output_tokens,
            )
        splitter = self._splitters[delta.index]
        before = splitter.num_reasoning_tokens
        answer = splitter.feed(delta)
        self.meter.num_reasoning_tokens += splitter.num_reasoning_tokens - before
        return answer


class _PartWriter:
    """Passes on parts in the place of text."""

    def __init__(self, writer: AnswerWriter, parts: _Parts) -> None:
        self._writer = writer
        self._parts = parts

    def prompt_ready(self, ready: PromptReady) -> bytes:
        """Return what opens the choices."""
        return self._writer.prompt_ready(ready, usage_of(self._parts.meter))

    def delta(self, delta: TextDelta) -> bytes:
        """Return what a choice gained."""
        return self._writer.delta(self._parts.of(delta))

    def end(self) -> bytes:
        """Return the closing events."""
        return self._writer.end(usage_of(self._parts.meter))


@dataclass(slots=True)
class AnsweredToolCall:
    """A call that the model asks for."""

    call_id: str
    name: str
    arguments: str
    """JSON text as the model wrote it; not valid JSON where the model or the length failed."""


@dataclass(slots=True)
class AnsweredChoice:
    """All of one choice."""

    index: int
    content: str | None
    """None where the model wrote only calls."""
    reasoning: str | None
    tool_calls: list[AnsweredToolCall]
    finish_reason: AnswerFinish
    stop_reason: str | int | None
    tokens: list[ShownToken] = field(default_factory=list)
    """Where the request asks for tokens."""

    @property
    def token_ids(self) -> list[int]:
        """The tokens that are shown."""
        return [token.token_id for token in self.tokens]


@dataclass(slots=True)
class ChatAnswer:
    """A whole answer."""

    choices: list[AnsweredChoice]
    usage: Usage
    prompt_logprobs: Sequence[TokenLogprob | None] | None

    @property
    def num_prompt_rows(self) -> int:
        """Prompt tokens whose log-probabilities have to be written."""
        return 0 if self.prompt_logprobs is None else len(self.prompt_logprobs)


async def collect_chat(exchange: Exchange, job: ChatJob) -> ChatAnswer:
    """Wait for the whole answer."""
    generation = await start_generation(
        job.gateway, job.model, exchange, job.request, job.generation
    )
    sink = _CollectingSink(job, _Parts(job, generation.meter))
    (prompt_logprobs,) = await collect_into(sink, exchange, generation, num_prompts=1)
    return ChatAnswer(sink.choices(), usage_of(generation.meter), prompt_logprobs)


class _CollectingSink:
    """Puts answers together."""

    def __init__(self, job: ChatJob, parts: _Parts) -> None:
        self._parts = parts
        self._choices = [_GrowingChoice(index, job.echoed) for index in range(job.n)]

    def is_ready(self) -> bool:
        """Always."""
        return True

    def take(self, delta: TextDelta) -> None:
        """Add what the choice gained."""
        self._choices[delta.index].add(self._parts.of(delta))

    def choices(self) -> list[AnsweredChoice]:
        """Return the choices as they are."""
        return [choice.answered() for choice in self._choices]


class _GrowingChoice:
    def __init__(self, index: int, echoed: str) -> None:
        self._index = index
        self._content = [echoed] if echoed else []
        self._reasoning: list[str] = []
        self._calls: list[tuple[ToolCallStart, list[str]]] = []
        self._tokens: list[ShownToken] = []
        self._finish_reason: AnswerFinish = "length"
        self._stop_reason: str | int | None = None

    def add(self, delta: AnswerDelta) -> None:
        for part in delta.parts:
            match part:
                case ContentText(text):
                    self._content.append(text)
                case ReasoningText(text):
                    self._reasoning.append(text)
                case ToolCallStart():
                    self._calls.append((part, []))
                case ToolCallArguments(index, text):
                    self._calls[index][1].append(text)
        self._tokens.extend(delta.tokens)
        if delta.finish_reason is not None:
            self._finish_reason = delta.finish_reason
            self._stop_reason = delta.stop_reason

    def answered(self) -> AnsweredChoice:
        has_others = bool(self._calls or self._reasoning)
        return AnsweredChoice(
            index=self._index,
            content=None if has_others and not self._content else "".join(self._content),
            reasoning="".join(self._reasoning) or None,
            tool_calls=[
                AnsweredToolCall(start.call_id, start.name, "".join(arguments))
                for start, arguments in self._calls
            ],
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
            tokens=self._tokens,
        )
