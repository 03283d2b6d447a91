"""What a bill reads of whoever counts its request."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from twinfire.gateway.metrics import FirstTokenPart


class Meter(Protocol):
    """Counts of one request so far, which are what its client is told."""

    cost_nanos: int | None
    """What the client asked to be told that it costs, once that is settled."""

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts."""
        ...

    @property
    def num_cached_tokens(self) -> int:
        """Of the prompts' tokens, those that nobody computed for the request."""
        ...

    @property
    def num_output_tokens(self) -> int:
        """Of all choices."""
        ...

    @property
    def billed_counts(self) -> tuple[int, int, int, int]:
        """Input, cached, output and reasoning tokens that are paid for."""
        ...

    @property
    def num_billed_tokens(self) -> int:
        """Of these, input and output."""
        ...

    @property
    def finish_reasons(self) -> Collection[str]:
        """Those of the choices that have ended."""
        ...

    @property
    def queue_s(self) -> float:
        """The longest that a prompt waited before its first step."""
        ...

    @property
    def ttft_s(self) -> float | None:
        """From the arrival to the first token of all, None before it."""
        ...

    @property
    def first_token_parts(self) -> Mapping[FirstTokenPart, float]:
        """Where that time went; empty where it is not known."""
        ...
