"""The text of one choice: detokenising, stop strings, and the tokens that belong to what is shown.

Turns what a worker sends into what a client may see. Text, tokens and log-probabilities always end
together: a token is released with the first character it gave, and dropped if none of it is shown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from twinfire.gateway.text.detokenizer import Detokenizer
from twinfire.gateway.text.stop_strings import StopScanner, StopStrings
from twinfire.gateway.text.token_logprobs import TokenLogprob, unpack_logprobs
from twinfire.gateway.text.vocabulary import Vocabulary
from twinfire.protocol.messages import ChoiceDelta, FinishReason
from twinfire.protocol.tokens import unpack_ids

ClientFinish = Literal["stop", "length"]
"""Why a choice ended, as far as clients are concerned."""


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How the output of a request becomes text, the same for all its choices."""

    stops: StopStrings
    include_stop_in_output: bool = False
    skip_special_tokens: bool = True
    shown_special_ids: frozenset[int] = frozenset()
    """Special tokens that are part of the text all the same: marks of calls and of reasoning."""
    min_tokens: int = 0
    want_tokens: bool = False
    """Whether released tokens are reported one by one; log-probabilities need it."""


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token whose text is shown."""

    token_id: int
    start: int
    """Character of the choice's text at which it begins."""
    logprob: TokenLogprob | None


class TextDelta(msgspec.Struct):
    """What a client sees more of one choice."""

    index: int
    """Of the choice, over all prompts of the request."""
    text: str
    tokens: Sequence[ShownToken] = ()
    finish_reason: ClientFinish | None = None
    stop_reason: str | int | None = None
    """The stop string, or the request's own stop token id; None for the model's end token."""
    num_output_tokens: int = 0
    """Of the choice so far."""


@dataclass(slots=True)
class _Waiting:
    """Tokens that are not shown yet."""

    tokens: deque[ShownToken] = field(default_factory=deque)

    def release(self, shown: int, everything: bool) -> list[ShownToken]:
        """Take the tokens that begin before character `shown`, or all of them."""
        taken: list[ShownToken] = []
        while self.tokens and (everything or self.tokens[0].start < shown):
            taken.append(self.tokens.popleft())
        return taken


class ChoiceText:
    """One choice from its first token to its finish."""

    def __init__(
        self, index: int, vocabulary: Vocabulary, prompt: Sequence[int], options: TextOptions
    ) -> None:
        self.index = index
        self.num_output_tokens = 0
        self.finished = False
        self._options = options
        self._by_token = bool(options.stops) or options.want_tokens
        self._detokenizer = Detokenizer(
            vocabulary, prompt, options.skip_special_tokens, options.shown_special_ids
        )
        self._scanner = StopScanner(options.stops, options.include_stop_in_output)
        self._waiting = _Waiting()
        self._num_seen = 0
        """Characters that the detokeniser gave."""
        self._num_shown = 0

    def feed(self, delta: ChoiceDelta) -> TextDelta:
        """Return what the client gains; the choice is `finished` when it has a finish reason."""
        token_ids = unpack_ids(delta.tokens)
        if delta.finish_reason is None and not self._by_token:
            self.num_output_tokens += len(token_ids)
            text = self._detokenizer.feed(token_ids)
            return TextDelta(self.index, text, num_output_tokens=self.num_output_tokens)
        logprobs = None if delta.logprobs is None else unpack_logprobs(token_ids, delta.logprobs)
        tokens: list[ShownToken] = []
        if self._by_token:
            shown = self._feed_each(token_ids, logprobs, tokens, ended=_has_ending_token(delta))
        else:
            shown = self._feed_together(token_ids, ended=_has_ending_token(delta))
        if self._scanner.matched is None and delta.finish_reason is not None:
            shown += self._end_of_text()
            self._release(tokens)
        return self._delta(shown, tokens, delta)

    def _feed_together(self, token_ids: Sequence[int], ended: bool) -> str:
        """Nobody asks for single tokens and nothing is held back."""
        self.num_output_tokens += len(token_ids)
        return self._detokenizer.feed(token_ids[:-1] if self._hides_last(ended) else token_ids)

    def _feed_each(
        self,
        token_ids: Sequence[int],
        logprobs: list[TokenLogprob] | None,
        released: list[ShownToken],
        ended: bool,
    ) -> str:
        """Return the text that may be shown; the tokens that go with it are added to `released`."""
        num_visible = len(token_ids) - self._hides_last(ended)
        pieces: list[str] = []
        for position, token_id in enumerate(token_ids):
            self.num_output_tokens += 1
            text = self._detokenizer.feed((token_id,)) if position < num_visible else ""
            logprob = logprobs[position] if logprobs is not None else None
            self._waiting.tokens.append(ShownToken(token_id, self._num_seen, logprob))
            self._num_seen += len(text)
            armed = self.num_output_tokens > self._options.min_tokens
            pieces.append(self._scanner.feed(text, armed=armed))
            self._num_shown += len(pieces[-1])
            # A token without text belongs to what stands before it, not to a stop string that
            # begins behind it in the same step.
            self._release(released)
            if self._scanner.matched is not None:
                break
        return "".join(pieces)

    def _hides_last(self, ended: bool) -> bool:
        """Whether the last token ended the choice, so that its text is not part of the output."""
        return ended and not self._options.include_stop_in_output

    def _end_of_text(self) -> str:
        tail = self._detokenizer.finish()
        self._num_seen += len(tail)
        shown = self._scanner.feed(tail, armed=self.num_output_tokens > self._options.min_tokens)
        if self._scanner.matched is None:
            shown += self._scanner.flush()
        self._num_shown += len(shown)
        return shown

    def _release(self, released: list[ShownToken]) -> None:
        all_shown = self._num_shown == self._num_seen and not self._detokenizer.has_pending
        nothing_held = self._scanner.matched is None and all_shown
        released += self._waiting.release(self._num_shown, everything=nothing_held)

    def _delta(self, shown: str, tokens: Sequence[ShownToken], delta: ChoiceDelta) -> TextDelta:
        matched = self._scanner.matched
        finish_reason = _client_finish(delta.finish_reason)
        stop_reason: str | int | None = delta.stop_token_id
        if matched is not None:
            finish_reason, stop_reason = "stop", matched
        self.finished = finish_reason is not None
        return TextDelta(
            index=self.index,
            text=shown,
            tokens=tokens if self._options.want_tokens else (),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_output_tokens=self.num_output_tokens,
        )


def _has_ending_token(delta: ChoiceDelta) -> bool:
    return delta.finish_reason == "stop" and not delta.ends_with_text


def _client_finish(reason: FinishReason | None) -> ClientFinish | None:
    if reason is None or reason == "stop" or reason == "length":
        return reason
    raise ValueError(f"a choice that ended with '{reason}' has no text")
