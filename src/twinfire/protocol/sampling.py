"""How the tokens of one request are drawn: resolved numbers, no text.

The gateway fills every field (defaults, seed, stop ids) before a request leaves it, so that two
workers given the same `SamplingParams` draw the same tokens.
"""

from __future__ import annotations

import msgspec

from twinfire.protocol.grammar import Grammar
from twinfire.protocol.pooling import Pooling

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this draw the most likely token."""


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """Sampling of one request.

    Order of the steps (that of the OpenAI field definitions as vLLM applies them): raw
    log-probabilities, grammar, allowed ids, bad words, min_tokens, logit bias, penalties,
    temperature, min-p, top-k, top-p, draw.
    """

    max_tokens: int
    """Output tokens at most, >= 0; already bounded by the model's window."""
    seed: int
    """64-bit seed of the counter-based noise."""
    n: int = 1
    """Independent choices drawn from one prompt."""
    temperature: float = 1.0
    top_k: int = 0
    """Keep this many most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Over prompt and output."""
    presence_penalty: float = 0.0
    """Over output only."""
    frequency_penalty: float = 0.0
    """Over output only."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, added logit) pairs."""
    allowed_token_ids: tuple[int, ...] = ()
    """Only these may be drawn; empty allows all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences whose last token is forbidden after its others."""
    min_tokens: int = 0
    """End-of-sequence and stop ids are forbidden before this many output tokens."""
    eos_token_ids: tuple[int, ...] = ()
    """The model's own end tokens; unused when `ignore_eos`."""
    stop_token_ids: tuple[int, ...] = ()
    """The request's own end tokens."""
    ignore_eos: bool = False
    logprobs: int = -1
    """Report this many most likely tokens beside the drawn one; -1 reports nothing."""
    prompt_logprobs: int = -1
    """The same for each prompt token; -1 reports nothing. Disables prefix-cache reads."""
    grammar: Grammar | None = None
    """What the output must look like; tokens that would break it cannot be drawn.

    Ending ids can be drawn just where the output is complete, and a choice ends at once where
    nothing can be added, whatever `min_tokens` and `ignore_eos` say.
    """
    pooling: Pooling | None = None
    """How the prompt's hidden states become its embedding, which is all that is computed then.

    The mean needs every one of them, so it disables prefix-cache reads.
    """

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def ending_token_ids(self) -> frozenset[int]:
        """Ids that end a choice."""
        eos = () if self.ignore_eos else self.eos_token_ids
        return frozenset(eos) | frozenset(self.stop_token_ids)
