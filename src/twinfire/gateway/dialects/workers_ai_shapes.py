"""What `/ai` offers: the paths that are OpenAI's, and which shape a model's native streams have."""

from __future__ import annotations

from twinfire.gateway.settings import WorkersAiStreams

SHARED_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/messages",
    "/v1/responses",
)
"""Offered under `/ai` as they are."""

_WITH_OPENAI_CHUNKS = (
    "@cf/deepseek-ai/deepseek-v4",
    "@cf/google/gemma-4",
    "@cf/kimi/",
    "@cf/meta/llama-4",
    "@cf/moonshotai/",
    "@cf/openai/",
    "@cf/qwen/qwen3",
    "@cf/zai-org/",
)
"""Beginnings of the names of newer models, as far as their streams have been published."""


def streams_openai_chunks(model: str, style: WorkersAiStreams) -> bool:
    """Whether a stream of `model` has OpenAI's chunks; `auto` does as the service does."""
    if style == "auto":
        return model.startswith(_WITH_OPENAI_CHUNKS)
    return style == "openai"
