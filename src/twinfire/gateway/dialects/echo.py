"""A prompt that the answer begins with."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from twinfire.gateway.dialects.prompts import TextOrIds
from twinfire.gateway.text.choice_text import ShownToken
from twinfire.gateway.text.detokenizer import Detokenizer
from twinfire.gateway.text.token_logprobs import TokenLogprob
from twinfire.gateway.text.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """The prompt's text, and where in it each of its tokens begins."""

    text: str
    ids: array[int]
    starts: Sequence[int]

    def tokens(self, rows: Sequence[TokenLogprob | None] | None) -> list[ShownToken]:
        """Return the prompt's tokens with their log-probabilities, where there are any."""
        entries = rows if rows is not None else [None] * len(self.ids)
        return [
            ShownToken(token_id, start, entry)
            for token_id, start, entry in zip(self.ids, self.starts, entries, strict=True)
        ]

    def shifted(self, tokens: Sequence[ShownToken]) -> list[ShownToken]:
        """Return output tokens with their place in the text that the prompt begins."""
        offset = len(self.text)
        return [ShownToken(token.token_id, offset + token.start, token.logprob) for token in tokens]


def echo_prompt(
    prompt: TextOrIds, ids: array[int], vocabulary: Vocabulary, skip_special_tokens: bool
) -> EchoedPrompt:
    """Return the echo of a prompt: its own text, or that of the ids the client sent."""
    detokenizer = Detokenizer(vocabulary, (), skip_special_tokens)
    pieces: list[str] = []
    starts: list[int] = []
    num_chars = 0
    for token_id in ids:
        starts.append(num_chars)
        piece = detokenizer.feed((token_id,))
        pieces.append(piece)
        num_chars += len(piece)
    # A character that the prompt leaves incomplete is completed, and then shown, by the output.
    text = prompt if isinstance(prompt, str) else "".join(pieces)
    return EchoedPrompt(text, ids, starts)
