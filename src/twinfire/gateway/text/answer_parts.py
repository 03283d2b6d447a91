"""What a model's answer consists of: content, reasoning and tool calls, as a stream of parts.

Dialects write these; `answer_splitter` makes them from text. A call's start comes before its
arguments, calls are numbered from 0 in each choice, and parts keep the order of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from twinfire.gateway.text.choice_text import ShownToken

AnswerFinish = Literal["stop", "length", "tool_calls"]
"""Why a choice ended. `length` where calls were cut, too."""


class ContentText(msgspec.Struct):
    """More text of the answer."""

    text: str


class ReasoningText(msgspec.Struct):
    """More text of what the model thinks before it answers."""

    text: str


class ToolCallStart(msgspec.Struct):
    """A call begins; its arguments follow."""

    index: int
    """Of the call in its choice."""
    call_id: str
    name: str


class ToolCallArguments(msgspec.Struct):
    """More JSON text of a call's arguments."""

    index: int
    text: str


AnswerPart = ContentText | ReasoningText | ToolCallStart | ToolCallArguments


class AnswerDelta(msgspec.Struct):
    """What one choice gained."""

    index: int
    """Of the choice."""
    parts: Sequence[AnswerPart]
    tokens: Sequence[ShownToken] = ()
    """Those that the parts are made of, where the request asks for tokens."""
    finish_reason: AnswerFinish | None = None
    stop_reason: str | int | None = None
    """The stop string, or the request's own stop token id; None for the model's end token."""
    num_output_tokens: int = 0
    """Of the choice so far."""
    num_reasoning_tokens: int = 0
    """Of those, the ones inside the reasoning."""
