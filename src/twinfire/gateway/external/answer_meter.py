"""Counts of one external answer, by what its engine says of them: what the client sees is billed.

An engine that has not told its usage yet, or never does, is counted by what it sent.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Raw

from twinfire.gateway.external.external_job import Fields
from twinfire.gateway.metrics import FirstTokenPart

T = TypeVar("T")
_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class _PromptDetails(msgspec.Struct):
    cached_tokens: _Count | None = None


class _OutputDetails(msgspec.Struct):
    reasoning_tokens: _Count | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: _Count
    completion_tokens: _Count | None = None
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _OutputDetails | None = None
    reasoning_tokens: _Count | None = None
    """Where SGLang has it."""


class _Choice(msgspec.Struct):
    index: int = 0
    finish_reason: str | None = None


_CHOICES = msgspec.json.Decoder(list[_Choice])
_USAGE = msgspec.json.Decoder(_Usage)


class AnswerMeter:
    """One attempt's answer. A bill reads it."""

    def __init__(self, num_guessed_input_tokens: int = 0, *, is_split: bool = False) -> None:
        """With `is_split` the count of cached tokens is another engine's to tell."""
        self.queue_s = 0.0
        self.ttft_s: float | None = None
        self.first_token_parts: dict[FirstTokenPart, float] = {}
        self.finish_reasons: set[str] = set()
        self.cost_nanos: int | None = None
        self.split_cached_tokens: int | None = None
        """What the engine of the prompt said, once it has."""
        self._num_guessed_input_tokens = num_guessed_input_tokens
        self._is_split = is_split
        self._finished: set[int] = set()
        self._num_entries = 0
        self._usage: _Usage | None = None
        self._outputs: dict[int, int] = {}
        """Output tokens of each choice, while nobody has told those of all."""

    @property
    def num_finished(self) -> int:
        """Choices that have ended."""
        return len(self._finished)

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts."""
        return self.billed_counts[0]

    @property
    def num_cached_tokens(self) -> int:
        """Of the prompts' tokens, those that no engine computed."""
        return self.billed_counts[1]

    @property
    def num_output_tokens(self) -> int:
        """Of all choices."""
        return self.billed_counts[2]

    @property
    def num_billed_tokens(self) -> int:
        """Input and output."""
        num_input, _, num_output, _ = self.billed_counts
        return num_input + num_output

    @property
    def billed_counts(self) -> tuple[int, int, int, int]:
        """Input, cached, output and reasoning tokens."""
        usage = self._usage
        if usage is None:
            num_input = self._num_guessed_input_tokens if self._num_entries else 0
            return num_input, 0, self._num_entries, 0
        cached = self.split_cached_tokens if self._is_split else _cached_tokens(usage)
        num_output = sum(self._outputs.values()) or usage.completion_tokens or 0
        reasoning = min(_reasoning_tokens(usage), num_output)
        return usage.prompt_tokens, min(cached or 0, usage.prompt_tokens), num_output, reasoning

    def read(self, answer: Fields) -> None:
        """Count what one object of the answer says; what is not understood is left out."""
        choices = _decoded(_CHOICES, answer.get("choices")) or ()
        # An engine sends about one entry for each token.
        self._num_entries += len(choices)
        for choice in choices:
            if choice.finish_reason:
                self._finished.add(choice.index)
                self.finish_reasons.add(choice.finish_reason)
        usage = _decoded(_USAGE, answer.get("usage"))
        if usage is None:
            return
        self._usage = usage
        if len(choices) == 1:
            # With a chunk engines tell what its own choice has, at the end what all have.
            self._outputs[choices[0].index] = usage.completion_tokens or 0
        else:
            self._outputs.clear()


def _decoded(decoder: msgspec.json.Decoder[T], raw: Raw | None) -> T | None:
    try:
        return None if raw is None else decoder.decode(raw)
    except msgspec.DecodeError:
        return None


def _cached_tokens(usage: _Usage) -> int | None:
    details = usage.prompt_tokens_details
    return None if details is None else details.cached_tokens


def _reasoning_tokens(usage: _Usage) -> int:
    details = usage.completion_tokens_details
    told = None if details is None else details.reasoning_tokens
    return told or usage.reasoning_tokens or 0
