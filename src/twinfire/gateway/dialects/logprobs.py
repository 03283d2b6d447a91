"""Log-probabilities in the shapes that clients of the OpenAI dialects expect."""

from __future__ import annotations

from collections.abc import Sequence

from twinfire.gateway.dialects.responses import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)
from twinfire.gateway.text.choice_text import ShownToken
from twinfire.gateway.text.token_logprobs import TokenLogprob
from twinfire.gateway.text.vocabulary import Vocabulary


class LogprobFormat:
    """How tokens are written: as text, or as `token_id:ID` where the request asks for it."""

    def __init__(self, vocabulary: Vocabulary, tokens_as_ids: bool) -> None:
        self._vocabulary = vocabulary
        self._tokens_as_ids = tokens_as_ids

    def token(self, token_id: int) -> str:
        """Return a token as it is shown."""
        return f"token_id:{token_id}" if self._tokens_as_ids else self._vocabulary.text_of(token_id)

    def chat(self, tokens: Sequence[ShownToken], num_top: int) -> ChatLogprobs:
        """Return the log-probabilities of a message's tokens."""
        content = [
            ChatTokenLogprob(
                token=self.token(entry.token_id),
                logprob=entry.logprob,
                bytes=list(self._vocabulary.bytes_of(entry.token_id)),
                top_logprobs=[self._top(*pair) for pair in entry.top[:num_top]],
            )
            for entry in (token.logprob for token in tokens)
            if entry is not None
        ]
        return ChatLogprobs(content)

    def completion(self, tokens: Sequence[ShownToken]) -> CompletionLogprobs:
        """Return the log-probabilities of a continuation."""
        result = CompletionLogprobs([], [], [], [])
        for token in tokens:
            entry = token.logprob
            result.text_offset.append(token.start)
            result.tokens.append(self.token(token.token_id))
            result.token_logprobs.append(None if entry is None else entry.logprob)
            result.top_logprobs.append(None if entry is None else self._top_by_text(entry))
        return result

    def prompt(self, rows: Sequence[TokenLogprob | None]) -> PromptLogprobs:
        """Return the log-probabilities of a prompt, per token by token id."""
        return [None if entry is None else self._prompt_row(entry) for entry in rows]

    def _prompt_row(self, entry: TokenLogprob) -> dict[str, PromptLogprob]:
        row = {
            str(token_id): PromptLogprob(logprob, rank, self._vocabulary.text_of(token_id))
            for rank, (token_id, logprob) in enumerate(entry.top, start=1)
        }
        text = self._vocabulary.text_of(entry.token_id)
        row[str(entry.token_id)] = PromptLogprob(entry.logprob, entry.rank, text)
        return row

    def _top(self, token_id: int, logprob: float) -> TopLogprob:
        content = list(self._vocabulary.bytes_of(token_id))
        return TopLogprob(token=self.token(token_id), logprob=logprob, bytes=content)

    def _top_by_text(self, entry: TokenLogprob) -> dict[str, float]:
        by_text: dict[str, float] = {}
        for token_id, logprob in entry.top_and_drawn():
            # Two tokens may have one text, such as halves of characters: the likelier counts.
            by_text.setdefault(self.token(token_id), logprob)
        return by_text
