"""What clients of `/ai/run` may send, for the description of the server.

Bodies are read by `workers_ai_input`, field by field, and checked as chat requests.
"""

from __future__ import annotations

import msgspec

from twinfire.gateway.dialects.json_body import JsonValue
from twinfire.gateway.dialects.requests import ChatRequest, Message


class RunOptions(msgspec.Struct, kw_only=True):
    """How a request is to be run."""

    reject_if_busy: bool | None = msgspec.field(default=None, name="rejectIfBusy")
    """Whether it is refused with 3040 where it would have to wait for a worker."""


class RunRequest(ChatRequest, kw_only=True):
    """`POST /ai/run/{model}`: a conversation or a text."""

    messages: list[Message] | None = None  # type: ignore[assignment]
    prompt: str | None = None
    """A text: the user's message, or all of the prompt where `raw` is true."""
    raw: bool | None = None
    options: RunOptions | None = None


class RunEnvelope(msgspec.Struct, kw_only=True):
    """`POST /ai/run`: a model and what goes into it."""

    model: str
    input: dict[str, JsonValue]
    """As `/ai/run/{model}` takes it."""
    options: RunOptions | None = None
