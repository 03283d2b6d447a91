"""The events of a streamed `/ai/run`, native or in OpenAI's shape, padded.

Each event has its text in one place only: clients add up what they find in either.
"""

from __future__ import annotations

import msgspec

from twinfire.gateway.dialects.chat_job import ChatJob
from twinfire.gateway.dialects.chat_stream import ChatStream
from twinfire.gateway.dialects.responses import Usage
from twinfire.gateway.dialects.stream_padding import StreamPadding
from twinfire.gateway.text.answer_parts import (
    AnswerDelta,
    AnswerPart,
    ContentText,
    ReasoningText,
    ToolCallStart,
)
from twinfire.gateway.text_generation import PromptReady

_encode = msgspec.json.Encoder().encode


class NativeStream:
    """Events with `response`, as older models give them. Shows the first choice."""

    def __init__(self, job: ChatJob) -> None:
        self._echoed = job.echoed
        self._padding = StreamPadding()

    def prompt_ready(self, ready: PromptReady, usage: Usage) -> bytes:
        """Return the text that the answer begins with, if any."""
        return self._text(b"response", self._echoed) if self._echoed else b""

    def delta(self, delta: AnswerDelta) -> bytes:
        """Return an event for each part, and one for the end."""
        if delta.index:
            return b""
        frames = b"".join(map(self._part, delta.parts))
        if delta.finish_reason is not None:
            finish = b'data: {"response":"","finish_reason":"%b"' % delta.finish_reason.encode()
            frames += finish + self._padding.tail()
        return frames

    def end(self, usage: Usage) -> bytes:
        """Return the event that tells what was used."""
        return usage_event(usage)

    def _part(self, part: AnswerPart) -> bytes:
        if isinstance(part, ContentText):
            return self._text(b"response", part.text)
        if isinstance(part, ReasoningText):
            return b'data: {"response":"","reasoning_content":%b' % _encode(part.text) + (
                self._padding.tail()
            )
        if isinstance(part, ToolCallStart):
            call = b'"id":%b,"type":"function","index":%d,"function":{"name":%b,"arguments":""}' % (
                _encode(part.call_id),
                part.index,
                _encode(part.name),
            )
        else:
            call = b'"index":%d,"function":{"arguments":%b}' % (part.index, _encode(part.text))
        return b'data: {"tool_calls":[{%b}]' % call + self._padding.tail()

    def _text(self, field: bytes, text: str) -> bytes:
        return b'data: {"%b":%b' % (field, _encode(text)) + self._padding.tail()


class OpenAiRunStream:
    """OpenAI's chunks, as newer models give them, and one native event with the totals."""

    def __init__(self, job: ChatJob) -> None:
        self._chunks = ChatStream(job)
        self._padding = StreamPadding()

    def prompt_ready(self, ready: PromptReady, usage: Usage) -> bytes:
        """Return what opens the choices."""
        return self._padding.pad(self._chunks.prompt_ready(ready, usage))

    def delta(self, delta: AnswerDelta) -> bytes:
        """Return the chunks of what a choice gained."""
        return self._padding.pad(self._chunks.delta(delta))

    def end(self, usage: Usage) -> bytes:
        """Return the chunk with the usage, and the native event."""
        return self._padding.pad(self._chunks.end(usage)) + usage_event(usage)


def usage_event(usage: Usage) -> bytes:
    """Return the last event of a stream, the one with authority over what was used."""
    return b'data: {"response":"","usage":' + _encode(usage) + b"}\n\n"
