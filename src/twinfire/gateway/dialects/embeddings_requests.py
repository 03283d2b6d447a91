"""What clients of `/v1/embeddings` may send, and what it answers."""

from __future__ import annotations

from typing import Literal

import msgspec

from twinfire.gateway.dialects.requests import Positive, SamplingFields, TokenId


class EmbeddingsRequest(SamplingFields, kw_only=True):
    """`POST /v1/embeddings`."""

    input: str | list[str | TokenId | list[TokenId]] | None = None
    """A text, token ids, or a list of either."""
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive | None = None
    """Keeps the first so many, normed again; for models that were trained for it."""


class Embedding(msgspec.Struct):
    """One input's embedding: a list of numbers, or base64 of little-endian f32."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingsUsage(msgspec.Struct):
    """What the inputs used."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(msgspec.Struct):
    """Answer of `/v1/embeddings`."""

    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage
    object: Literal["list"] = "list"
