"""What the OpenAI dialects answer. Fields that are not set are left out of the JSON."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType


class PromptTokensDetails(msgspec.Struct):
    """Of the prompt tokens, those that nobody computed for this request."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """What the output tokens were for, and how they came about."""

    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    """Of the output, tokens that were drafted, from the client's prediction or otherwise."""
    rejected_prediction_tokens: int = 0
    """Drafted tokens that are no part of the output; they are not counted in it."""


class Usage(msgspec.Struct):
    """What a request used."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
    cost: float | UnsetType = UNSET
    """In units of the price table's currency, where the client asks for it."""


class TopLogprob(msgspec.Struct):
    """A token that was likely at its place."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    """A token of the output and what else was likely there."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities of a message's tokens."""

    content: list[ChatTokenLogprob]


class CompletionLogprobs(msgspec.Struct):
    """Log-probabilities as lists over tokens; null for the first token of an echoed prompt."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(msgspec.Struct):
    """How likely a token was at a place of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""Per prompt token: by token id; null for the first."""


class CalledFunction(msgspec.Struct):
    """What is to be called."""

    name: str
    arguments: str
    """JSON text, as the model wrote it."""


class ToolCall(msgspec.Struct):
    """A call that the model asks for."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    """Null where there are only calls or reasoning."""
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    """The same."""
    tool_calls: list[ToolCall] | UnsetType = UNSET
    function_call: CalledFunction | UnsetType = UNSET
    """For clients that sent `functions`."""


FinishWord = Literal["stop", "length", "tool_calls", "function_call"]


class ChatChoice(msgspec.Struct):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishWord
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class ChatResponse(msgspec.Struct):
    """Answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(msgspec.Struct):
    """One continuation."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionResponse(msgspec.Struct):
    """Answer of `/v1/completions`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: str


class ModelCard(msgspec.Struct):
    """A model that is served."""

    id: str
    created: int
    root: str
    max_model_len: int | None
    object: Literal["model"] = "model"
    owned_by: str = "twinfire"
    parent: None = None
    permission: list[str] = []


class ModelList(msgspec.Struct):
    """Answer of `/v1/models`."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class TokenizeResponse(msgspec.Struct):
    """Answer of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(msgspec.Struct):
    """Answer of `/detokenize`."""

    prompt: str


class VersionResponse(msgspec.Struct):
    """Answer of `/version`."""

    version: str


class HealthResponse(msgspec.Struct):
    """Answer of `/health` when all is well."""

    status: Literal["ok"] = "ok"
    models: dict[str, str] = {}
    """Every model with its state."""
