"""The events of a streamed message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from twinfire.gateway.dialects.anthropic_shapes import (
    AnswerBlock,
    AnthropicUsage,
    MessageAnswer,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
    anthropic_usage,
    stop_reason,
)
from twinfire.gateway.dialects.chat_answer import ChatAnswer
from twinfire.gateway.dialects.chat_job import ChatJob
from twinfire.gateway.dialects.responses import Usage
from twinfire.gateway.dialects.sse import encode
from twinfire.gateway.text.answer_parts import (
    AnswerDelta,
    AnswerFinish,
    ContentText,
    ReasoningText,
    ToolCallArguments,
    ToolCallStart,
)
from twinfire.gateway.text_generation import PromptReady

BlockKind = Literal["text", "thinking", "tool_use"]
_DELTA_STARTS: Mapping[BlockKind, bytes] = {
    "text": b'"delta":{"type":"text_delta","text":',
    "thinking": b'"delta":{"type":"thinking_delta","thinking":',
    "tool_use": b'"delta":{"type":"input_json_delta","partial_json":',
}
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class MessageWriter:
    """Writes one streamed message."""

    def __init__(self, job: ChatJob) -> None:
        self._job = job
        self._open: BlockKind | None = None
        self._num_blocks = 0
        self._delta_head = b""
        """A delta of the open block up to its text, encoded once."""
        self._finish: AnswerFinish = "stop"
        self._stopped_by: str | int | None = None

    def prompt_ready(self, ready: PromptReady, usage: Usage) -> bytes:
        """Return the message as it begins."""
        message = MessageAnswer(
            id=self._job.answer_id, model=self._job.model.name, usage=anthropic_usage(usage)
        )
        return _event("message_start", {"message": message}) + _PING

    def delta(self, delta: AnswerDelta) -> bytes:
        """Return the events of what the answer gained."""
        frames: list[bytes] = []
        for part in delta.parts:
            if isinstance(part, ContentText):
                frames.append(self._text("text", part.text))
            elif isinstance(part, ReasoningText):
                frames.append(self._text("thinking", part.text))
            elif isinstance(part, ToolCallStart):
                frames.append(self._begin("tool_use", ToolUseBlock(part.call_id, part.name, {})))
            elif isinstance(part, ToolCallArguments):
                frames.append(self._text("tool_use", part.text))
        if delta.finish_reason is not None:
            self._finish, self._stopped_by = delta.finish_reason, delta.stop_reason
        return b"".join(frames)

    def end(self, usage: Usage) -> bytes:
        """Return the closing events."""
        frames = b""
        if not self._num_blocks:
            frames = self._begin("text", TextBlock(""))
        frames += self._close()
        reason, sequence = stop_reason(self._job, self._finish, self._stopped_by)
        counts: AnthropicUsage = anthropic_usage(usage)
        ended = {"stop_reason": reason, "stop_sequence": sequence}
        frames += _event("message_delta", {"delta": ended, "usage": counts})
        return frames + _event("message_stop", {})

    def _text(self, kind: BlockKind, text: str) -> bytes:
        frames = b""
        if self._open != kind:
            block = TextBlock("") if kind == "text" else ThinkingBlock("", "")
            frames = self._begin(kind, block)
        return frames + self._delta_head + encode(text) + b"}}\n\n"

    def _begin(self, kind: BlockKind, block: AnswerBlock) -> bytes:
        frames = self._close()
        index = self._num_blocks
        self._open = kind
        self._num_blocks += 1
        head = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
        self._delta_head = head % index + _DELTA_STARTS[kind]
        return frames + _event("content_block_start", {"index": index, "content_block": block})

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        index = self._num_blocks - 1
        frames = b""
        if self._open == "thinking":
            signed = {"type": "signature_delta", "signature": self._job.answer_id}
            frames = _event("content_block_delta", {"index": index, "delta": signed})
        self._open = None
        return frames + _event("content_block_stop", {"index": index})


def whole_message(job: ChatJob, answer: ChatAnswer) -> MessageAnswer:
    """Return the message of an answer that came whole."""
    choice = answer.choices[0]
    content: list[AnswerBlock] = []
    if choice.reasoning:
        content.append(ThinkingBlock(choice.reasoning, job.answer_id))
    if choice.content or not (choice.tool_calls or content):
        content.append(TextBlock(choice.content or ""))
    content += [
        ToolUseBlock(call.call_id, call.name, _input(call.arguments)) for call in choice.tool_calls
    ]
    reason, sequence = stop_reason(job, choice.finish_reason, choice.stop_reason)
    return MessageAnswer(
        id=job.answer_id,
        model=job.model.name,
        content=content,
        stop_reason=reason,
        stop_sequence=sequence,
        usage=anthropic_usage(answer.usage),
    )


def _input(arguments: str) -> dict[str, object]:
    """Return a call's arguments; those that are cut or wrong are none, as this dialect has it."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _event(kind: str, fields: dict[str, object]) -> bytes:
    name = kind.encode()
    return b"event: %b\ndata: %b\n\n" % (name, encode({"type": kind, **fields}))
