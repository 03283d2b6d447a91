"""Draws the tokens of a step, those after drafts included, and applies each to its choice.

A choice with drafts has a row for its next token and one behind each draft. Rows are drawn in
turns: the first of every choice, then the second of those whose first draw was their first draft,
and so on. Noise is of a token's position alone, so a row draws what a step of its own would have
drawn there, and penalties, grammars and log-probabilities see exactly the tokens before it: with
drafts and without, the output is the same, at any temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from twinfire.engine.drafters.drafter import num_right
from twinfire.engine.inputs import DrawRows
from twinfire.engine.logprob_rows import join_logprob_rows
from twinfire.engine.request import Choice, Request
from twinfire.engine.sampler import Logits, Sample, Sampler, SampleRow
from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.messages import FinishReason, LogprobRows


@dataclass(slots=True, eq=False)
class Gain:
    """What one choice gained in a step."""

    rows: DrawRows
    choice: Choice
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    ends_with_text: bool = False
    refusal: InvalidRequest | None = None
    """Why the request cannot go on."""
    _logprobs: list[LogprobRows] = field(default_factory=list)

    @property
    def request(self) -> Request:
        """Whose choice it is."""
        return self.rows.request

    @property
    def is_own(self) -> bool:
        """Whether the sequence goes on with this choice; others fork from it."""
        return self.choice.index == self.rows.piece.sequence.key[2]

    @property
    def has_ended(self) -> bool:
        """Whether nothing comes after it."""
        return self.finish_reason is not None or self.refusal is not None

    @property
    def num_accepted(self) -> int:
        """Drafts that were drawn."""
        return num_right(self.rows.piece.drafts, self.token_ids)

    def logprobs(self) -> LogprobRows | None:
        """Return a row for each token, None where they are not wanted."""
        return join_logprob_rows(self._logprobs) if self._logprobs else None

    def take(self, sample: Sample) -> None:
        """Apply the next draw."""
        grammar, request, history = self.choice.grammar, self.request, self.choice.history
        token_id = sample.token_id
        if sample.is_dead_end:
            # An output that is complete ends where nothing can be added, for whatever reason.
            if grammar is not None and grammar.may_end:
                self.finish_reason, self.ends_with_text = "stop", True
            else:
                self.refusal = _dead_end(request, grammar.failure if grammar is not None else "")
            return
        ends = token_id in request.ending_token_ids
        if grammar is not None and not ends and not grammar.accept(token_id):
            self.refusal = _dead_end(request, grammar.failure)
            return
        history.append(token_id)
        self.token_ids.append(token_id)
        if sample.logprobs is not None:
            self._logprobs.append(sample.logprobs)
        if ends:
            self.finish_reason = "stop"
            self.stop_token_id = token_id if token_id in request.sampling.stop_token_ids else None
        elif grammar is not None and grammar.is_done:
            self.finish_reason, self.ends_with_text = "stop", True
        elif history.num_output >= request.sampling.max_tokens:
            self.finish_reason = "length"


class Verifier:
    """Draws over a sampler."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def draw(self, logits: Logits, draws: Sequence[DrawRows]) -> list[Gain]:
        """Return what each choice gains from `logits` [*, vocab], which is modified."""
        gains = [Gain(rows, rows.request.choice(rows.choice)) for rows in draws]
        raw_argmax = self._sampler.argmax(logits)
        going_on, turn = gains, 0
        while going_on:
            samples = self._sampler.sample(
                logits,
                [_sample_row(gain, turn) for gain in going_on],
                [gain.rows.first_row + turn for gain in going_on],
                raw_argmax,
            )
            for gain, sample in zip(going_on, samples, strict=True):
                gain.take(sample)
            going_on = [gain for gain in going_on if _hit(gain, turn)]
            turn += 1
        return gains


def _hit(gain: Gain, turn: int) -> bool:
    """Whether a choice goes on and its draft of this turn was drawn."""
    drafts = gain.rows.piece.drafts
    return not gain.has_ended and turn < len(drafts) and drafts[turn] == gain.token_ids[turn]


def _sample_row(gain: Gain, turn: int) -> SampleRow:
    return SampleRow(
        params=gain.request.sampling,
        choice=gain.choice.index,
        position=gain.rows.first_position + turn,
        history=gain.choice.history,
        grammar=gain.choice.grammar,
    )


def _dead_end(request: Request, failure: str) -> InvalidRequest:
    if failure:
        return InvalidRequest(f"the output could not be held to its grammar: {failure}")
    sampling = request.sampling
    limits = {
        "allowed_token_ids": bool(sampling.allowed_token_ids),
        "logit_bias": bool(sampling.logit_bias),
        "bad_words": bool(sampling.bad_words),
        "min_tokens": sampling.min_tokens > 0,
        "stop_token_ids": bool(sampling.stop_token_ids),
    }
    named = [name for name, is_set in limits.items() if is_set]
    return InvalidRequest(
        "the grammar and " + (", ".join(named) or "the vocabulary") + " leave no token to draw",
        param=named[0] if named else None,
    )
