"""Joins drafters and engine: whom to draft for, how far, and what came of it.

Asked before each step for drafts of the sequences that decode, and told after it which were drawn.
Owns the contexts that drafters see, one for each sequence from its first draft to its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Series

from twinfire.engine.drafters.draft_lengths import DraftLengths
from twinfire.engine.drafters.drafter import Draft, DraftContext, Drafter
from twinfire.engine.drafters.step_costs import StepCosts
from twinfire.engine.request import Request
from twinfire.engine.verifier import Gain
from twinfire.scheduler.scheduler import Scheduler
from twinfire.scheduler.sequence import Sequence, Status
from twinfire.scheduler.step_plan import StepPlan


class Speculator:
    """One engine's drafts, at most `max_drafts` tokens each.

    `lengths` chooses how many of them are worth a row, by `costs`; it is told what became of them.
    """

    def __init__(
        self, drafter: Drafter, max_drafts: int, lengths: DraftLengths, costs: StepCosts
    ) -> None:
        self._drafter = drafter
        self._costs = costs
        self._max_drafts = max_drafts
        self._lengths = lengths
        self._contexts: dict[Sequence, DraftContext] = {}
        self._drafts: dict[Sequence, Draft] = {}
        self._num_drafted = [0] * max_drafts
        self._num_accepted = [0] * max_drafts

    @property
    def num_drafted(self) -> tuple[int, ...]:
        """Drafts verified since the start, by position."""
        return tuple(self._num_drafted)

    @property
    def num_accepted(self) -> tuple[int, ...]:
        """Those of `num_drafted` that were drawn."""
        return tuple(self._num_accepted)

    def propose(self, scheduler: Scheduler, owners: Mapping[Sequence, Request]) -> None:
        """Set the drafts of the sequences that decode in the next step."""
        self._drafts.clear()
        self.leave_ended()
        decoding = scheduler.decoding()
        drafted_for = [one for one in decoding if self._limit(one) > 0 and one in owners]
        if not drafted_for:
            return
        contexts = [self._context(one, owners[one]) for one in drafted_for]
        drafts = self._drafter.propose(contexts)
        num_prompt_rows = min(
            scheduler.num_prefill_tokens_waiting,
            scheduler.config.max_num_batched_tokens - len(decoding),
        )
        num_others = len(decoding) - len(drafted_for) + max(0, num_prompt_rows)
        lengths = self._lengths.choose(drafts, num_others)
        for sequence, draft, length in zip(drafted_for, drafts, lengths, strict=True):
            sequence.drafts = tuple(draft.token_ids[:length])
            if draft.token_ids:
                self._drafts[sequence] = draft

    def verified(self, gains: Series[Gain]) -> None:
        """Learn from what was drawn after the drafts of the last `propose`."""
        for gain in gains:
            sequence = gain.rows.piece.sequence
            draft = self._drafts.get(sequence)
            if draft is None or gain.choice.index != sequence.key[2]:
                continue
            num_accepted = gain.num_accepted
            for position in range(len(gain.rows.piece.drafts)):
                self._num_drafted[position] += 1
                self._num_accepted[position] += position < num_accepted
            # Each drawn token judges a guess, whether or not a row was spent on it.
            judged = list(zip(draft.token_ids, gain.token_ids, strict=False))
            num_right = next((i for i, (a, b) in enumerate(judged) if a != b), len(judged))
            self._lengths.note_verdict(draft.source, draft.confidences[: len(judged)], num_right)

    def note_step(self, plan: StepPlan, elapsed_s: float) -> None:
        """Learn how long a step took that only decoded."""
        if all(piece.known_end == piece.start + 1 for piece in plan.slices):
            self._costs.note(plan.num_tokens, elapsed_s)

    def _limit(self, sequence: Sequence) -> int:
        # The last token of all is drawn and never computed.
        return min(self._max_drafts, sequence.max_total_tokens - sequence.num_tokens - 1)

    def _context(self, sequence: Sequence, request: Request) -> DraftContext:
        context = self._contexts.get(sequence)
        if context is None:
            context = DraftContext(
                key=sequence.key,
                tokens=sequence.tokens,
                num_prompt_tokens=sequence.num_prompt_tokens,
                tenant=request.cache_salt,
                prediction=request.prediction,
            )
            self._contexts[sequence] = context
        context.limit = self._limit(sequence)
        return context

    def leave_ended(self) -> None:
        """Let drafters learn what has ended."""
        ended = [one for one in self._contexts if one.status is Status.FINISHED]
        for sequence in ended:
            # Cancelled ones are learnt too: they were cut where a client had what it wanted.
            self._drafter.ended(self._contexts.pop(sequence))
