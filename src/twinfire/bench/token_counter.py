"""How many prompt tokens the server makes of a text, asked of the server itself.

Uses a `/tokenize` endpoint (vLLM's and ours, or llama.cpp's shape) checked against the usage of one
one-token request; where there is none, fits a line through the usage of two of them. Never loads
a tokenizer: the server's own count is the one that is billed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

import msgspec

from twinfire.bench.client import Client, ServerUnusable
from twinfire.bench.prompt_source import PromptSource
from twinfire.bench.request import JsonValue, user_request

_SAMPLE_CHARS = 1600
_SMALL_SAMPLE_CHARS = 200
_UNIT = re.compile(r"[^\W\d_]{1,8}|\d{1,2}|[^\w\s]{1,2}|_|\n|[ \t]{2,}")

Method = Literal["tokenize", "usage"]


class _Tokens(msgspec.Struct):
    count: int | None = None
    tokens: list[msgspec.Raw] | None = None


class TokenCounter:
    """Counts the prompt tokens of a request with one user message."""

    def __init__(
        self, client: Client, method: Method, field: str, overhead: float, per_unit: float
    ) -> None:
        self._client = client
        self._field = field
        self.method: Method = method
        self.overhead = round(overhead)
        """Tokens that the template adds around one message."""
        self.per_unit = per_unit
        """Tokens in one unit of `text_units`, on average."""

    async def count(self, text: str) -> int | None:
        """Return the prompt tokens of a request with `text`; None without a `/tokenize`."""
        if self.method == "usage":
            return None
        bare = await _tokenize(self._client, self._field, text)
        return None if bare is None else bare + self.overhead

    def estimate(self, text: str) -> int:
        """Return about as many tokens as the server will count."""
        return round(self.overhead + self.per_unit * text_units(text))


def text_units(text: str) -> int:
    """Return the pieces that most tokenizers would cut a text into; steadier than characters."""
    return len(_UNIT.findall(text))


async def calibrate(client: Client, source: PromptSource) -> TokenCounter:
    """Find out how the server counts; ServerUnusable when it answers no one-token request."""
    sample = source.fork("calibration").take(_SAMPLE_CHARS)
    used = await _usage(client, sample)
    for field in ("prompt", "content"):
        bare = await _tokenize(client, field, sample)
        if bare is not None and bare > 0:
            per_unit = bare / text_units(sample)
            overhead = used - bare if used is not None else 0
            return TokenCounter(client, "tokenize", field, overhead, per_unit)
    small = source.fork("calibration of overhead").take(_SMALL_SAMPLE_CHARS)
    used_small = await _usage(client, small)
    if used is None or used_small is None:
        raise ServerUnusable(
            "the server reports no usage and has no /tokenize: "
            "prompts of a given number of tokens cannot be made for it"
        )
    units, small_units = text_units(sample), text_units(small)
    per_unit = max((used - used_small) / max(units - small_units, 1), 0.1)
    return TokenCounter(client, "usage", "", max(used - per_unit * units, 0), per_unit)


async def _usage(client: Client, text: str) -> int | None:
    record = await client.measure(user_request(text, max_tokens=1))
    # One token may be a special one, whose text is empty: its usage counts all the same.
    if record.prompt_tokens is None and record.error_kind not in (None, "empty"):
        raise ServerUnusable(
            f"a one-token request failed ({record.error_kind}): {record.error_message}"
        )
    return record.prompt_tokens


async def _tokenize(client: Client, field: str, text: str) -> int | None:
    card = await client.model()
    body: Mapping[str, JsonValue] = {"model": card.id, field: text}
    content = await client.post_json("/tokenize", body)
    if content is None:
        return None
    try:
        answer = msgspec.json.decode(content, type=_Tokens)
    except msgspec.DecodeError:
        return None
    if answer.count is not None:
        return answer.count
    return None if answer.tokens is None else len(answer.tokens)
