"""The events of a response, and the output items that they build up.

The items are the same whether a client streams or waits: both go through `ResponseWriter`. Events
are numbered from 0 without gaps, which is what resuming a stream counts on.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

from twinfire.gateway.dialects.chat_answer import ChatAnswer
from twinfire.gateway.dialects.chat_job import ChatJob
from twinfire.gateway.dialects.openai_responses_items import (
    RUNNING,
    FunctionCallItem,
    IncompleteDetails,
    InputTokensDetails,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputText,
    OutputTokensDetails,
    ReasoningItem,
    ReasoningPart,
    ResponseObject,
    ResponsesError,
    ResponseStatus,
    ResponsesUsage,
    item_id,
)
from twinfire.gateway.dialects.responses import ChatTokenLogprob, Usage
from twinfire.gateway.dialects.sse import encode
from twinfire.gateway.errors import Fault
from twinfire.gateway.exchange import DONE_EVENT
from twinfire.gateway.text.answer_parts import (
    AnswerDelta,
    AnswerFinish,
    ContentText,
    ReasoningText,
    ToolCallArguments,
    ToolCallStart,
)
from twinfire.gateway.text.choice_text import ShownToken
from twinfire.gateway.text_generation import PromptReady

ItemKind = Literal["message", "function_call", "reasoning"]
_DELTAS: dict[ItemKind, str] = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}
_ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""Of statuses; all others are a `server_error`."""


@dataclass(slots=True)
class _OpenItem:
    """The item that the model is writing."""

    kind: ItemKind
    id: str
    index: int
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[ChatTokenLogprob] = field(default_factory=list)
    delta_head: bytes = b""
    """A delta up to its number, encoded once."""
    delta_rest: bytes = b""
    """A delta from its number to its text."""

    def item(self, status: ItemStatus) -> OutputItem:
        """Return it as it is now."""
        text = "".join(self.pieces)
        if self.kind == "function_call":
            return FunctionCallItem(self.id, status, self.call_id, self.name, text)
        if self.kind == "reasoning":
            return ReasoningItem(self.id, status, [ReasoningPart(text)] if text else [])
        content = [OutputText(text, [], self.logprobs)] if status != "in_progress" else []
        return MessageItem(self.id, status, content)


class ResponseWriter:
    """Writes one response; `response` is true at any time."""

    def __init__(self, response: ResponseObject, job: ChatJob) -> None:
        self.response = response
        self._job = job
        self._next_number = 0
        self._open: _OpenItem | None = None
        self._finish: AnswerFinish = "stop"

    def created(self) -> bytes:
        """Return what opens a response that may have to wait."""
        frames = self._whole("response.created")
        if self.response.status == "queued":
            frames += self._whole("response.queued")
        return frames

    def prompt_ready(self, ready: PromptReady, usage: Usage) -> bytes:
        """Return what tells that the model writes now."""
        frames = b"" if self._next_number else self.created()
        self.response.status = "in_progress"
        return frames + self._whole("response.in_progress")

    def delta(self, delta: AnswerDelta) -> bytes:
        """Return the events of what the answer gained."""
        frames: list[bytes] = []
        logprobs = self._logprobs(delta.tokens)
        for part in delta.parts:
            if isinstance(part, ContentText):
                frames.append(self._text("message", part.text, logprobs))
                logprobs = []
            elif isinstance(part, ReasoningText):
                frames.append(self._text("reasoning", part.text, []))
            elif isinstance(part, ToolCallStart):
                frames.append(self._begin("function_call", part.call_id, part.name))
            elif isinstance(part, ToolCallArguments):
                frames.append(self._text("function_call", part.text, []))
        if delta.finish_reason is not None:
            self._finish = delta.finish_reason
        return b"".join(frames)

    def end(self, usage: Usage) -> bytes:
        """Return the closing events."""
        was_cut = self._finish == "length"
        frames = b""
        if self._open is None and not self.response.output:
            frames = self._begin("message")
        frames += self._close("incomplete" if was_cut else "completed")
        self.response.usage = responses_usage(usage)
        if was_cut:
            self.response.incomplete_details = IncompleteDetails("max_output_tokens")
        return frames + self._settle("incomplete" if was_cut else "completed")

    def collected(self, answer: ChatAnswer) -> ResponseObject:
        """Return the response of an answer that came whole."""
        choice = answer.choices[0]
        self._next_number = 1
        self.response.status = "in_progress"
        if choice.reasoning:
            self._text("reasoning", choice.reasoning, [])
        if choice.content:
            self._text("message", choice.content, self._logprobs(choice.tokens))
        for call in choice.tool_calls:
            self._begin("function_call", call.call_id, call.name)
            self._text("function_call", call.arguments, [])
        self._finish = choice.finish_reason
        self.end(answer.usage)
        return self.response

    def failed(self, fault: Fault) -> bytes:
        """Return the events that end the response with a fault, `[DONE]` and all."""
        if self.response.status not in RUNNING:
            return DONE_EVENT
        frames = b"" if self._next_number else self.created()
        self._keep_open_item()
        code = _ERROR_CODES.get(fault.status, "server_error")
        self.response.error = ResponsesError(code, fault.body.error.message)
        return frames + self._settle("failed") + DONE_EVENT

    def cancelled(self) -> bytes:
        """Return the event that ends a response which the client called off."""
        self._keep_open_item()
        return self._settle("cancelled")

    def _settle(self, status: ResponseStatus) -> bytes:
        self.response.status = status
        if status == "completed":
            self.response.completed_at = int(time.time())
        # There is no event of its own for a response that was called off.
        return self._whole(f"response.{'incomplete' if status == 'cancelled' else status}")

    def _text(self, kind: ItemKind, text: str, logprobs: list[ChatTokenLogprob]) -> bytes:
        frames = b""
        if self._open is None or self._open.kind != kind:
            frames = self._begin(kind)
        item = self._open
        assert item is not None, "it was just begun"
        item.pieces.append(text)
        item.logprobs += logprobs
        delta = item.delta_head + b"%d" % self._next_number + item.delta_rest + encode(text)
        self._next_number += 1
        if kind == "message":
            delta += b',"logprobs":' + encode(logprobs)
        return frames + delta + b"}\n\n"

    def _begin(self, kind: ItemKind, call_id: str = "", name: str = "") -> bytes:
        frames = self._close("completed")
        index = len(self.response.output)
        item = _OpenItem(
            kind, item_id(self.response.id, kind, "output", index), index, call_id, name
        )
        event = f"{_DELTAS[kind]}.delta"
        item.delta_head = _head(event)
        item.delta_rest = b"," + _inner(_where(item)) + b',"delta":'
        self._open = item
        frames += self._event(
            "response.output_item.added", output_index=index, item=item.item("in_progress")
        )
        if kind != "function_call":
            part = OutputText("") if kind == "message" else ReasoningPart("")
            frames += self._event("response.content_part.added", **_where(item), part=part)
        return frames

    def _close(self, status: ItemStatus) -> bytes:
        item = self._open
        if item is None:
            return b""
        done = item.item(status)
        self.response.output = [*self.response.output, done]
        self._open = None
        where, text = _where(item), "".join(item.pieces)
        if item.kind == "function_call":
            call = {"name": item.name, "arguments": text}
            frames = self._event("response.function_call_arguments.done", **where, **call)
        elif item.kind == "reasoning":
            frames = self._event("response.reasoning_text.done", **where, text=text)
            frames += self._event("response.content_part.done", **where, part=ReasoningPart(text))
        else:
            part = OutputText(text, [], item.logprobs)
            frames = self._event(
                "response.output_text.done", **where, text=text, logprobs=item.logprobs
            )
            frames += self._event("response.content_part.done", **where, part=part)
        return frames + self._event("response.output_item.done", output_index=item.index, item=done)

    def _keep_open_item(self) -> None:
        if self._open is not None:
            self.response.output = [*self.response.output, self._open.item("incomplete")]
            self._open = None

    def _logprobs(self, tokens: object) -> list[ChatTokenLogprob]:
        num_top = self._job.num_top_logprobs
        if num_top is None or not isinstance(tokens, list | tuple):
            return []
        shown: list[ShownToken] = list(tokens)
        return self._job.logprob_format.chat(shown, num_top).content

    def _whole(self, event: str) -> bytes:
        return self._event(event, response=self.response)

    def _event(self, event: str, **fields: object) -> bytes:
        number = b"%d" % self._next_number
        self._next_number += 1
        return _head(event) + number + b"," + _inner(fields) + b"}\n\n"


def _head(event: str) -> bytes:
    """Return an event up to its number."""
    name = event.encode()
    return b'event: %b\ndata: {"type":"%b","sequence_number":' % (name, name)


def _inner(fields: dict[str, object]) -> bytes:
    """Return the fields as JSON without braces."""
    return encode(fields)[1:-1]


def _where(item: _OpenItem) -> dict[str, object]:
    where: dict[str, object] = {"item_id": item.id, "output_index": item.index}
    return where if item.kind == "function_call" else {**where, "content_index": 0}


def responses_usage(usage: Usage) -> ResponsesUsage:
    """Return a chat completion's usage as this dialect writes it."""
    return ResponsesUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(usage.completion_tokens_details.reasoning_tokens),
        total_tokens=usage.total_tokens,
    )
