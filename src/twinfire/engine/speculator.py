"""Joins drafters and engine: whom to draft for, how far, and what came of it.

Asked before each step for drafts of the sequences that decode, and told after it which were drawn.
Owns the contexts that drafters see, one for each sequence from its first draft to its end.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from collections.abc import Sequence as Series

from twinfire.engine.drafters.draft_lengths import DraftLengths
from twinfire.engine.drafters.drafter import Draft, DraftContext, Drafter, num_right
from twinfire.engine.drafters.eagle3 import SOURCE as EAGLE3_SOURCE
from twinfire.engine.drafters.eagle3 import Eagle3Drafter
from twinfire.engine.drafters.guarded import GuardedDrafter
from twinfire.engine.drafters.head_worth import HeadWorth
from twinfire.engine.drafters.step_costs import StepCosts
from twinfire.engine.request import Request
from twinfire.engine.verifier import Gain
from twinfire.scheduler.block_tables import BlockTables
from twinfire.scheduler.scheduler import Scheduler
from twinfire.scheduler.sequence import Sequence, Status
from twinfire.scheduler.step_plan import StepPlan

log = logging.getLogger(__name__)


class Speculator:
    """One engine's drafts, at most `max_drafts` tokens each.

    `lengths` chooses how many of them are worth a row, by `costs`; it is told what became of them.
    """

    def __init__(
        self,
        drafter: Drafter,
        max_drafts: int,
        lengths: DraftLengths,
        costs: StepCosts,
        head: Eagle3Drafter | None = None,
        worth: HeadWorth | None = None,
        *,
        vocab_size: int,
    ) -> None:
        """`head` is the draft head that `drafter` is or asks, to be shown every step.

        It rests where `worth` says so; without, never.
        """
        self._drafter = GuardedDrafter(drafter)
        self._head = head
        self._worth = worth
        self._vocab_size = vocab_size
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
        # What is drawn beyond a prompt's first token would have to be computed anew elsewhere.
        drafted_for = [
            one
            for one in decoding
            if self._limit(one) > 0 and one in owners and not owners[one].handed_over
        ]
        if not drafted_for:
            return
        if self._head is not None and self._rests(len(drafted_for)):
            self._head.forget_arrivals()
        contexts = [self._context(one, owners[one]) for one in drafted_for]
        drafts = [
            _fit_grammar(self._known_tokens(draft), context, owners[sequence])
            for sequence, context, draft in zip(
                drafted_for, contexts, self._drafter.propose(contexts), strict=True
            )
        ]
        num_free = scheduler.config.max_num_batched_tokens - len(decoding)
        num_prompt_rows = min(scheduler.num_prompt_tokens_next, num_free)
        num_others = len(decoding) - len(drafted_for) + num_prompt_rows
        lengths = self._lengths.choose(drafts, num_others, num_free - num_prompt_rows)
        for sequence, draft, length in zip(drafted_for, drafts, lengths, strict=True):
            sequence.drafts = tuple(draft.token_ids[:length])
            if draft.token_ids:
                self._drafts[sequence] = draft

    def computed(
        self, plan: StepPlan, gains: Series[Gain], elapsed_s: float
    ) -> dict[Sequence, bytes]:
        """Learn from a step that was committed, and let a draft head see it.

        Call it before another step is executed and while the sequences still hold their blocks.
        Returns what the same head would draft from elsewhere, of those that go on elsewhere.
        """
        self._note_verdicts(gains)
        only_decodes = all(piece.known_end == piece.start + 1 for piece in plan.slices)
        if only_decodes:
            self._costs.note(plan.num_tokens, elapsed_s)
        if self._head is not None:
            # What a step beside prompts took and saved is not told apart, so neither counts.
            spent_s = self._head.take_spent_s()
            if only_decodes and spent_s and self._worth is not None:
                self._note_worth(self._worth, plan, gains, spent_s)
            return self._follow(self._head, plan, gains)
        return {}

    def expect(self, sequences: Series[Sequence], feature: bytes, tables: BlockTables) -> None:
        """Draft by the head for sequences that the same head has followed at another worker.

        `feature` is what it sent, empty for nothing: then drafts begin with the second step, as
        they do after a feature that cannot be this head's, which is logged.
        """
        if self._head is None or not feature:
            return
        try:
            row = self._head.unpack_feature(feature)
        except ValueError as error:
            log.warning("drafts begin a step later: %s", error)
            return
        for sequence in sequences:
            self._head.expect(sequence, row, tables.filled_blocks(sequence))

    def leave_without_head(self, sequences: Series[Sequence]) -> None:
        """Draft for these without the head, which did not see their prompts."""
        if self._head is not None:
            self._head.lose(sequences)

    def _rests(self, num_streams: int) -> bool:
        return self._worth is not None and not self._worth.pays(num_streams)

    def _follow(
        self, head: Eagle3Drafter, plan: StepPlan, gains: Series[Gain]
    ) -> dict[Sequence, bytes]:
        going_on = {
            gain.rows.piece.sequence.key: gain.rows.piece.sequence
            for gain in gains
            if gain.is_own and not (gain.has_ended or gain.request.handed_over)
        }
        leaving = {
            gain.rows.piece.sequence
            for gain in gains
            if gain.request.handed_over and not gain.has_ended
        }
        if self._rests(len(going_on)):
            head.skip(plan)
            return {}
        try:
            head.follow(plan, going_on)
            return head.last_features(plan, leaving)
        except Exception:
            log.exception("a draft head failed; what was computed now goes on without it")
            head.skip(plan)
            return {}

    def _note_worth(
        self, worth: HeadWorth, plan: StepPlan, gains: Series[Gain], spent_s: float
    ) -> None:
        """Weigh what the head's drafts saved in a step against what they took."""
        drafted = [
            gain
            for gain in gains
            if gain.is_own
            and (draft := self._drafts.get(gain.rows.piece.sequence)) is not None
            and draft.source == EAGLE3_SOURCE
        ]
        num_streams, num_rows = len(plan.slices), plan.num_tokens
        num_accepted = sum(gain.num_accepted for gain in drafted)
        num_drafted = sum(len(gain.rows.piece.drafts) for gain in drafted)
        plain_s = self._costs.seconds(num_rows - num_drafted)
        worth.note(
            num_streams,
            num_accepted * self._costs.seconds(num_streams) / num_streams,
            spent_s + max(0.0, self._costs.seconds(num_rows) - plain_s),
        )

    def _note_verdicts(self, gains: Series[Gain]) -> None:
        for gain in gains:
            draft = self._drafts.get(gain.rows.piece.sequence)
            if draft is None or not gain.is_own:
                continue
            num_accepted = gain.num_accepted
            for position in range(len(gain.rows.piece.drafts)):
                self._num_drafted[position] += 1
                self._num_accepted[position] += position < num_accepted
            # Each drawn token judges a guess, whether or not a row was spent on it.
            self._lengths.note_verdict(
                draft.source,
                draft.confidences[: len(gain.token_ids)],
                num_right(draft.token_ids, gain.token_ids),
            )

    def _known_tokens(self, draft: Draft) -> Draft:
        """Return a draft up to the first token that the model does not have.

        A tokenizer may have more tokens than the model, and so may a client's prediction.
        """
        for count, token_id in enumerate(draft.token_ids):
            if token_id >= self._vocab_size:
                return draft.first(count)
        return draft

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


def _fit_grammar(draft: Draft, context: DraftContext, request: Request) -> Draft:
    grammar = request.choice(context.key[2]).grammar
    return draft if grammar is None else grammar.fit(draft, context.limit)
