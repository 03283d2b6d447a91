"""What clients of `/v1/messages` may send.

Shapes and fixed ranges only. Unknown fields are accepted and ignored, `cache_control` among them:
every prompt is cached as far as it goes. Blocks are flat structs; which fields a block of a type
needs is checked where it is used.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from twinfire.gateway.dialects.json_body import JsonValue
from twinfire.gateway.dialects.requests import NonNegative, Positive, PositiveProbability


class Block(msgspec.Struct, kw_only=True):
    """One block of a message's content."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, JsonValue] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None
    thinking: str | None = None
    source: dict[str, JsonValue] | None = None


class AnthropicMessage(msgspec.Struct, kw_only=True):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class AnthropicTool(msgspec.Struct, kw_only=True):
    """A tool that the model may use, or one that would run here, which is refused."""

    type: str | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, JsonValue] | None = None


class AnthropicToolChoice(msgspec.Struct, kw_only=True):
    """Which tools may or must be used."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """Whether the model thinks before it answers; its length is the model's to choose."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    """The form of the answer's text."""

    type: Literal["json_schema"]
    schema: dict[str, JsonValue]


class OutputConfig(msgspec.Struct, kw_only=True):
    """How much effort is made, and the form of the answer."""

    effort: str | None = None
    format: OutputFormat | None = None


class AnthropicMetadata(msgspec.Struct, kw_only=True):
    """Who asks."""

    user_id: str | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """`POST /v1/messages/count_tokens`, and what a message's request shares with it."""

    model: str | None = None
    messages: list[AnthropicMessage]
    system: str | list[Block] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    mcp_servers: JsonValue = None
    container: JsonValue = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """`POST /v1/messages`."""

    max_tokens: Positive
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: PositiveProbability | None = None
    top_k: NonNegative | None = None
    metadata: AnthropicMetadata | None = None
    service_tier: str | None = None
