"""What clients of `/v1/responses` may send.

Shapes and fixed ranges only. Unknown fields are accepted and ignored, null stands for an absent
field. Items are flat structs because clients leave their `type` out; which fields an item of a
type needs is checked where it is used.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from twinfire.gateway.dialects.json_body import JsonValue
from twinfire.gateway.dialects.requests import (
    Bias,
    FromMinusOne,
    Int32,
    Int64,
    NonNegative,
    Penalty,
    Positive,
    PositiveProbability,
    Probability,
    RepetitionPenalty,
    Temperature,
)

ItemRole = Literal["user", "assistant", "system", "developer"]


class InputPart(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One part of an item's content. Only parts with text are served."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A message, a function call, its output, a reasoning or a reference to an earlier item."""

    type: str | None = None
    id: str | None = None
    status: str | None = None
    role: ItemRole | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    phase: str | None = None


class ResponsesTool(msgspec.Struct, kw_only=True):
    """A function that the model may call, or a hosted tool, which is refused."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class ResponsesToolChoice(msgspec.Struct, kw_only=True):
    """A function that must be called, or the tools of which some may or must be."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[ResponsesToolChoice] | None = None


class TextFormat(msgspec.Struct, kw_only=True):
    """The form of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, JsonValue] | bool | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, kw_only=True):
    """Everything about the answer's text."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningConfig(msgspec.Struct, kw_only=True):
    """How long the model thinks. Summaries are never made: the reasoning itself is shown."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesStreamOptions(msgspec.Struct, kw_only=True):
    """Accepted for its callers."""

    include_obfuscation: bool | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """`POST /v1/responses`."""

    model: str | None = None
    input: str | list[InputItem] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Positive | None = None
    """Bounds hosted tools alone, of which there are none."""
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    max_output_tokens: Positive | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    service_tier: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    conversation: JsonValue = None
    prompt: JsonValue = None
    context_management: JsonValue = None
    temperature: Temperature | None = None
    top_p: PositiveProbability | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    top_k: FromMinusOne | None = None
    min_p: Probability | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, Bias] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    min_tokens: NonNegative | None = None
    ignore_eos: bool | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None
    priority: Int32 | None = None
    cache_salt: str | None = None
    reject_if_busy: bool | None = msgspec.field(default=None, name="rejectIfBusy")


SAME_IN_CHAT = (
    "model",
    "parallel_tool_calls",
    "user",
    "prompt_cache_key",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "logit_bias",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "chat_template_kwargs",
    "priority",
    "cache_salt",
    "reject_if_busy",
)
"""Fields that mean the same in a chat completion."""
