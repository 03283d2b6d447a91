"""One request to a chat or completions endpoint, and its JSON body.

Owns the mapping from what a scenario wants to what the two public APIs call it. Knows nothing of
sockets or time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import msgspec

Api = Literal["chat", "completions"]
JsonValue: TypeAlias = (
    "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
)

PATHS: Mapping[Api, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


class Message(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


class GenerationRequest(msgspec.Struct, frozen=True):
    """What to generate. Sampling fields left at None are not sent."""

    messages: tuple[Message, ...]
    max_tokens: int | None
    """Output tokens at most; None leaves it to the server."""
    ignore_eos: bool = False
    """Ask for exactly `max_tokens` (an extension; servers without it stop earlier)."""
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    session: str | None = None
    """Value of the session-affinity header; None sends none."""
    label: str = "all"
    """Groups records of one kind in a report."""
    more: Mapping[str, JsonValue] = {}
    """Further fields of the body."""


def user_request(
    text: str, max_tokens: int, *, label: str = "all", ignore_eos: bool = True
) -> GenerationRequest:
    """Return a greedy request with one user message, of fixed output length by default."""
    return GenerationRequest(
        messages=(Message("user", text),),
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        temperature=0.0,
        label=label,
    )


def prompt_text(messages: tuple[Message, ...]) -> str:
    """Return the messages as one plain prompt, for endpoints without roles."""
    return "\n\n".join(message.content for message in messages)


def request_body(
    request: GenerationRequest, model: str, api: Api, extra: Mapping[str, JsonValue]
) -> dict[str, JsonValue]:
    """Return the body of a streamed request that asks for usage; `extra` overrides fields.

    A field whose `extra` value is None is left out, so a caller can drop what a server refuses.
    """
    body: dict[str, JsonValue] = {"model": model, "stream": True}
    body["stream_options"] = {"include_usage": True}
    if api == "chat":
        body["messages"] = [{"role": m.role, "content": m.content} for m in request.messages]
    else:
        body["prompt"] = prompt_text(request.messages)
    optional: dict[str, JsonValue] = {
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "seed": request.seed,
        "ignore_eos": True if request.ignore_eos else None,
    }
    body.update({name: value for name, value in optional.items() if value is not None})
    body.update(request.more)
    body.update(extra)
    return {name: value for name, value in body.items() if value is not None}
