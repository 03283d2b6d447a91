"""What one chunk of a streamed answer says, the same for chat and completions.

Owns the tolerant reading of chunk JSON and the names of everything that can go wrong with a
request. Knows no sockets and no clock.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class StreamFault(Exception):
    """A request that failed. `kind` is one short word (or http_STATUS) to count by.

    refused: no connection. http_NNN: the status was no 200. timeout: the client's own limit.
    dropped: the connection broke mid-answer. malformed: what came is no OpenAI stream.
    server_error: an error object inside the stream. incomplete: a clean end without
    `finish_reason` and `[DONE]`. empty: an answer with no token at all.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message


class TextDelta(msgspec.Struct, frozen=True):
    """New text of the answer or of the reasoning before it; never empty."""

    text: str
    kind: Literal["content", "reasoning"] = "content"


class Finished(msgspec.Struct, frozen=True):
    """The choice is over."""

    reason: str


class Usage(msgspec.Struct, frozen=True):
    """Token counts as the server bills them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    """None where the server does not say."""
    accepted_tokens: int | None = None
    """Output tokens that had been guessed ahead; None where the server does not say."""
    rejected_tokens: int | None = None


class TokenIds(msgspec.Struct, frozen=True):
    """Ids of new output tokens, from servers that were asked for them (`return_token_ids`)."""

    count: int


StreamEvent = TextDelta | Finished | Usage | TokenIds


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _CompletionDetails(msgspec.Struct):
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _CompletionDetails | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw(b"null")


_DECODER = msgspec.json.Decoder(_Chunk)


def parse_chunk(payload: str) -> list[StreamEvent]:
    """Return the events of one `data` payload, text before its finish; StreamFault otherwise."""
    try:
        chunk = _DECODER.decode(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise StreamFault("malformed", f"{error} in {payload[:200]!r}") from None
    if bytes(chunk.error) != b"null":
        raise StreamFault("server_error", error_message(payload))
    if chunk.choices is None and chunk.usage is None:
        raise StreamFault("malformed", f"neither choices nor usage in {payload[:200]!r}")
    events: list[StreamEvent] = []
    for choice in chunk.choices or ():
        events += _choice_events(choice)
    if chunk.usage is not None:
        details = chunk.usage.prompt_tokens_details
        guesses = chunk.usage.completion_tokens_details or _CompletionDetails()
        events.append(
            Usage(
                prompt_tokens=chunk.usage.prompt_tokens,
                completion_tokens=chunk.usage.completion_tokens,
                cached_tokens=details.cached_tokens if details is not None else None,
                accepted_tokens=guesses.accepted_prediction_tokens,
                rejected_tokens=guesses.rejected_prediction_tokens,
            )
        )
    return events


def _choice_events(choice: _Choice) -> list[StreamEvent]:
    events: list[StreamEvent] = []
    delta = choice.delta
    if delta is not None:
        if reasoning := delta.reasoning or delta.reasoning_content:
            events.append(TextDelta(reasoning, "reasoning"))
        if delta.content:
            events.append(TextDelta(delta.content))
    if choice.text:
        events.append(TextDelta(choice.text))
    if choice.token_ids:
        events.append(TokenIds(len(choice.token_ids)))
    if choice.finish_reason is not None:
        events.append(Finished(choice.finish_reason))
    return events


class _ErrorBody(msgspec.Struct):
    error: msgspec.Raw = msgspec.Raw(b"null")
    message: str | None = None
    detail: msgspec.Raw = msgspec.Raw(b"null")


class _ErrorObject(msgspec.Struct):
    message: str


def error_message(body: str) -> str:
    """Return the human part of an error body, or its first 300 characters."""
    try:
        parsed = msgspec.json.decode(body, type=_ErrorBody)
        if parsed.message is not None:
            return parsed.message
        return msgspec.json.decode(parsed.error, type=_ErrorObject).message
    except (msgspec.DecodeError, RecursionError):
        return body[:300]
