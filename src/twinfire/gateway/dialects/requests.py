"""What clients of the OpenAI dialects may send.

Shapes and fixed ranges only; what depends on the model or on settings is checked where it is used.
Unknown fields are accepted and ignored, null stands for an absent field.
"""

from __future__ import annotations

from typing import Annotated, Literal, Protocol

import msgspec
from msgspec import Meta

from twinfire.gateway.dialects.json_body import JsonValue

MAX_N = 128
_INT32_MAX = 2**31 - 1

Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Int32 = Annotated[int, Meta(ge=-(2**31), le=_INT32_MAX)]
NonNegative = Annotated[int, Meta(ge=0, le=_INT32_MAX)]
Positive = Annotated[int, Meta(ge=1, le=_INT32_MAX)]
FromMinusOne = Annotated[int, Meta(ge=-1, le=_INT32_MAX)]
TokenId = Annotated[int, Meta(ge=0, le=_INT32_MAX)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Probability = Annotated[float, Meta(ge=0.0, le=1.0)]
PositiveProbability = Annotated[float, Meta(gt=0.0, le=1.0)]
Temperature = Annotated[float, Meta(ge=0.0, le=100.0)]
RepetitionPenalty = Annotated[float, Meta(gt=0.0, le=100.0)]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
TruncationSide = Literal["left", "right"]


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream tells besides its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
    """Whether every event of a chat is padded to a random length."""


class NotServed(msgspec.Struct, kw_only=True):
    """Fields that are known and refused: ignoring them would give a wrong answer."""

    structural_tag: JsonValue = None
    prompt_embeds: JsonValue = None
    logprob_token_ids: JsonValue = None
    kv_transfer_params: JsonValue = None
    repetition_detection: JsonValue = None
    thinking_token_budget: JsonValue = None


class SamplingFields(NotServed, kw_only=True):
    """What both generating endpoints share."""

    model: str | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    temperature: Temperature | None = None
    top_p: PositiveProbability | None = None
    top_k: FromMinusOne | None = None
    min_p: Probability | None = None
    seed: Int64 | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    min_tokens: NonNegative | None = None
    logit_bias: dict[str, Bias] | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    """Accepted for its callers; text here never gains a space that no token has."""
    prompt_logprobs: FromMinusOne | None = None
    truncate_prompt_tokens: FromMinusOne | None = None
    truncation_side: TruncationSide | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Int32 | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: JsonValue = None
    structured_outputs: JsonValue = None
    guided_json: JsonValue = None
    guided_regex: JsonValue = None
    guided_choice: JsonValue = None
    guided_grammar: JsonValue = None
    use_beam_search: JsonValue = None
    best_of: JsonValue = None
    user: str | None = None
    prompt_cache_key: str | None = None
    """The session, where no header names one."""
    reject_if_busy: bool | None = msgspec.field(default=None, name="rejectIfBusy")
    """Whether the request is refused where it would have to wait for a worker."""


class CompletionRequest(SamplingFields, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | TokenId | list[TokenId]] | None = None
    """A text, token ids, or a list of either."""
    max_tokens: NonNegative | None = None
    logprobs: FromMinusOne | None = None
    suffix: JsonValue = None


class ContentPart(msgspec.Struct, kw_only=True):
    """One part of a message. Only parts with text are served."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Message(msgspec.Struct, kw_only=True):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, JsonValue]] | None = None
    function_call: dict[str, JsonValue] | None = None
    """Of clients that know no `tool_calls`."""
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class Prediction(msgspec.Struct, kw_only=True):
    """What most of the answer is expected to be. It makes no other answer, only a sooner one."""

    type: Literal["content"]
    content: str | list[ContentPart]


class TemplateFields(Protocol):
    """How a conversation becomes a prompt; a struct has one base, so two of them spell this out."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    documents: list[dict[str, object]] | None
    chat_template: str | None
    chat_template_kwargs: dict[str, object] | None
    reasoning_effort: str | None
    tools: object


class ChatRequest(SamplingFields, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[Message]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, JsonValue]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    """Whether the answer shows what the model thinks; it is counted either way."""
    tools: JsonValue = None
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    prediction: Prediction | None = None
    logprobs: bool | None = None
    top_logprobs: FromMinusOne | None = None
    tool_choice: JsonValue = None
    parallel_tool_calls: bool | None = None
    functions: JsonValue = None
    function_call: JsonValue = None
    modalities: JsonValue = None
    audio: JsonValue = None
    mm_processor_kwargs: JsonValue = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /tokenize`: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, JsonValue]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None
    reasoning_effort: str | None = None
    tools: JsonValue = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /detokenize`."""

    tokens: list[TokenId]
    model: str | None = None
