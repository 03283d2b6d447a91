"""Completions over HTTP as a client sees them: token ids, text, usage, and how an answer ended."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

MAX_LINE_BYTES = 1 << 24


@dataclass
class Answer:
    """What came of one request. `status` 0: no answer began."""

    status: int = 0
    tokens: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    error: str | None = None
    """An error body, an error frame, or how the connection broke."""
    is_whole: bool = False
    """Whether it ended as answers do, with or without an error in it."""

    @property
    def is_good(self) -> bool:
        """Whether it is an answer, whole and without an error."""
        return self.status == 200 and self.is_whole and self.error is None

    def difference(self, expected: Answer) -> str | None:
        """Return in what a good answer differs from `expected`, None when in nothing."""
        if not self.is_good:
            return f"status {self.status}, whole {self.is_whole}, error {self.error}"
        names = ("tokens", "texts", "finish", "prompt_tokens", "completion_tokens")
        for name in names:
            mine, theirs = getattr(self, name), getattr(expected, name)
            if mine != theirs:
                return f"{name}: {mine} instead of {theirs}"
        return None

    def wrong_token(self, expected: Answer) -> str | None:
        """Return where what came of an answer is not how `expected` begins."""
        for choice, tokens in self.tokens.items():
            if tokens != expected.tokens[choice][: len(tokens)]:
                return f"choice {choice}: {tokens} does not begin {expected.tokens[choice]}"
        return None

    def take(self, body: dict[str, Any]) -> None:
        """Take a chunk of a stream, or a whole body."""
        if "error" in body:
            self.error = json.dumps(body["error"])
            return
        for choice in body.get("choices", ()):
            index = choice["index"]
            self.tokens.setdefault(index, []).extend(choice.get("token_ids") or ())
            self.texts[index] = self.texts.get(index, "") + choice["text"]
            if choice.get("finish_reason") is not None:
                self.finish[index] = choice["finish_reason"]
        if usage := body.get("usage"):
            self.prompt_tokens = usage["prompt_tokens"]
            self.completion_tokens = usage["completion_tokens"]
            self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


async def complete(
    session: aiohttp.ClientSession,
    url: str,
    body: dict[str, Any],
    *,
    headers: dict[str, str] | None = None,
    leave_after_texts: int | None = None,
    on_text: Callable[[int], None] = lambda num_texts: None,
) -> Answer:
    """Send one completion and read it to its end, however it ends.

    With `leave_after_texts` the connection is closed after so many chunks of a stream; `on_text`
    is called with the number of chunks so far.
    """
    asked = {"return_token_ids": True, **body}
    if asked.get("stream"):
        asked["stream_options"] = {"include_usage": True}
    answer = Answer()
    try:
        async with session.post(f"{url}/v1/completions", json=asked, headers=headers) as response:
            answer.status = response.status
            answer.headers = dict(response.headers)
            if not asked.get("stream") or response.status != 200:
                answer.take(json.loads(await response.read()))
                answer.is_whole = True
                return answer
            num_texts = 0
            async for chunk in _events(response):
                if chunk is None:
                    answer.is_whole = True
                    break
                answer.take(chunk)
                num_texts += 1
                on_text(num_texts)
                if leave_after_texts is not None and num_texts >= leave_after_texts:
                    response.close()
                    return answer
    except (aiohttp.ClientError, OSError, ValueError) as error:
        answer.error = answer.error or f"{type(error).__name__}: {error}"
        answer.is_whole = False
    return answer


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any] | None]:
    """Yield the chunks of a stream, and None for its end; ValueError for anything else."""
    async for line in response.content:
        if not (line := line.strip()) or line.startswith(b":"):
            continue
        if not line.startswith(b"data: "):
            raise ValueError(f"no event: {line[:200]!r}")
        data = line.removeprefix(b"data: ")
        if data == b"[DONE]":
            yield None
            return
        yield json.loads(data)


def client_session(timeout_s: float) -> aiohttp.ClientSession:
    """Return a session that opens a connection for each request and waits `timeout_s` for all."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(force_close=True, limit=0),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        read_bufsize=MAX_LINE_BYTES,
    )
