"""A chat request driven into an answer: streamed through a dialect's writer, or collected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from twinfire.gateway.dialects.chat_job import ChatJob
from twinfire.gateway.dialects.generate import collect, start_generation, stream, usage_of
from twinfire.gateway.dialects.responses import Usage
from twinfire.gateway.exchange import Exchange
from twinfire.gateway.request_meter import RequestMeter
from twinfire.gateway.text.answer_parts import AnswerDelta, AnswerFinish, ContentText
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
    await stream(exchange, generation, _PartWriter(writer, generation.meter), done_event=done_event)


class _PartWriter:
    """Makes parts of the text that comes."""

    def __init__(self, writer: AnswerWriter, meter: RequestMeter) -> None:
        self._writer = writer
        self._meter = meter

    def prompt_ready(self, ready: PromptReady) -> bytes:
        """Return what opens the choices."""
        return self._writer.prompt_ready(ready, usage_of(self._meter))

    def delta(self, delta: TextDelta) -> bytes:
        """Return what a choice gained."""
        return self._writer.delta(_answer_delta(delta))

    def end(self) -> bytes:
        """Return the closing events."""
        return self._writer.end(usage_of(self._meter))


def _answer_delta(delta: TextDelta) -> AnswerDelta:
    return AnswerDelta(
        delta.index,
        (ContentText(delta.text),) if delta.text else (),
        delta.tokens,
        delta.finish_reason,
        delta.stop_reason,
        delta.num_output_tokens,
    )


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
    answer = await collect(exchange, generation, num_prompts=1, num_choices=job.n)
    choices = [
        AnsweredChoice(
            index=index,
            content=job.echoed + choice.text,
            reasoning=None,
            tool_calls=[],
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            tokens=choice.tokens,
        )
        for index, choice in enumerate(answer.choices)
    ]
    return ChatAnswer(choices, answer.usage, answer.prompt_logprobs[0])
