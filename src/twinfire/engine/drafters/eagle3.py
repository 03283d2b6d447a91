"""Drafts by an EAGLE-3 head that follows its target step by step (arXiv:2503.01840).

After each step of the target the head computes the same rows, each from the target's features
there and the token after it. That overwrites what it had guessed at those places, fills its KV for
prompts as they are computed, and gives the first draft. Further drafts, from the head's own output,
are made only when they are asked for, and only while a chain is likely to hold.

The head's KV of a token depends on the token after it. In a cached block that two texts share, the
last token's is therefore of whichever text wrote it: one row of the head's context, which can cost
a draft and never changes what is said.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from twinfire.engine.draft_runner import DraftedTokens, DraftRunner
from twinfire.engine.drafters.drafter import ChoiceKey, Draft, DraftContext
from twinfire.engine.spans import Span, pack_spans, row_starts
from twinfire.scheduler.sequence import Sequence as ScheduledSequence
from twinfire.scheduler.sequence import Status
from twinfire.scheduler.step_plan import StepPlan

SOURCE = "eagle3"

_LEAST_CHANCE = 0.15
"""Of a whole chain, below which another pass for its next draft costs more than it brings."""


@dataclass(slots=True)
class _Chain:
    """Drafts after one sequence's last token."""

    sequence: ScheduledSequence
    kept_row: int
    """Logit row of the head's last call that the next draft comes from."""
    token_ids: list[int]
    probabilities: list[float]
    chance: float

    def add(self, drafted: DraftedTokens, row: int) -> None:
        self.kept_row = row
        self.token_ids.append(int(drafted.token_ids[row]))
        self.probabilities.append(float(drafted.probabilities[row]))
        self.chance *= self.probabilities[-1]


class Eagle3Drafter:
    """Makes chains of up to `max_drafts`, where the blocks of a sequence have room for them."""

    def __init__(
        self,
        head: DraftRunner,
        block_size: int,
        max_drafts: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._head = head
        self._block_size = block_size
        self._max_drafts = max_drafts
        self._clock = clock
        self._chains: dict[ChoiceKey, _Chain] = {}
        self._spent_s = 0.0
        self._lost: set[ScheduledSequence] = set()
        """Sequences that the head did not compute in some step, and so cannot draft for."""

    def follow(self, plan: StepPlan, going_on: Mapping[ChoiceKey, ScheduledSequence]) -> None:
        """Compute the head for a step of the target, between its commit and the next `execute`.

        `going_on` are the sequences that draw their next token in the next step.
        """
        self._chains.clear()
        self._drop_ended()
        spans: list[Span] = []
        feature_rows: list[int] = []
        drafting: list[tuple[ScheduledSequence, int]] = []
        first_row = 0
        for piece in plan.slices:
            sequence = piece.sequence
            # The token after the last one is not known where none was drawn.
            stop = min(piece.end, sequence.num_computed_tokens, sequence.num_tokens - 1)
            if piece.is_live and stop > piece.start and sequence not in self._lost:
                tokens = sequence.tokens[piece.start + 1 : stop + 1]
                spans.append(Span(sequence.block_ids, piece.start, tokens))
                feature_rows.extend(range(first_row, first_row + stop - piece.start))
                if sequence.key in going_on and stop == sequence.num_tokens - 1:
                    drafting.append((sequence, len(spans) - 1))
            first_row += piece.num_tokens
        if not spans:
            return
        ends = row_starts(spans)[1:]
        batch = pack_spans(spans, self._block_size, [int(ends[span]) - 1 for _, span in drafting])
        started_s = self._clock()
        drafted = self._head.first(batch, np.array(feature_rows, np.int32))
        if drafting:
            self._spent_s += self._clock() - started_s
        for row, (sequence, _) in enumerate(drafting):
            chain = _Chain(sequence, row, [], [], 1.0)
            chain.add(drafted, row)
            self._chains[sequence.key] = chain

    def skip(self, plan: StepPlan) -> None:
        """Let a step pass that the head does not compute; its sequences get no drafts any more."""
        self._chains.clear()
        self.lose([piece.sequence for piece in plan.slices])

    def lose(self, sequences: Sequence[ScheduledSequence]) -> None:
        """Draft no more for sequences of which the head has not computed all."""
        self._drop_ended()
        self._lost.update(sequences)

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """Return the chains; those that are asked for are drafted on first."""
        asked = [
            (chain, min(context.limit, self._max_drafts))
            for context in contexts
            if (chain := self._chains.get(context.key)) is not None
        ]
        started_s = self._clock()
        while growing := [chain for chain, limit in asked if self._grows(chain, limit)]:
            self._draft_on(growing)
        self._spent_s += self._clock() - started_s
        return [self._draft(context) for context in contexts]

    def take_spent_s(self) -> float:
        """Return the seconds that drafts have taken since the last call."""
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s

    def ended(self, context: DraftContext) -> None:
        """Forget a choice; a head learns nothing while it serves."""
        self.forget(context.key)

    def forget(self, key: ChoiceKey) -> None:
        """Forget a choice."""
        self._chains.pop(key, None)

    def _drop_ended(self) -> None:
        if self._lost:
            self._lost = {one for one in self._lost if one.status is not Status.FINISHED}

    def _grows(self, chain: _Chain, limit: int) -> bool:
        count = len(chain.token_ids)
        position = chain.sequence.num_computed_tokens - 1 + count
        has_room = position < len(chain.sequence.block_ids) * self._block_size
        return 0 < count < limit and chain.chance >= _LEAST_CHANCE and has_room

    def _draft_on(self, chains: Sequence[_Chain]) -> None:
        spans = [
            Span(
                chain.sequence.block_ids,
                chain.sequence.num_computed_tokens - 1 + len(chain.token_ids),
                chain.token_ids[-1:],
            )
            for chain in chains
        ]
        batch = pack_spans(spans, self._block_size, range(len(spans)))
        kept_rows = np.array([chain.kept_row for chain in chains], np.int32)
        drafted = self._head.further(batch, kept_rows)
        for row, chain in enumerate(chains):
            chain.add(drafted, row)

    def _draft(self, context: DraftContext) -> Draft:
        chain = self._chains.get(context.key)
        if chain is None or context.limit < 1:
            return Draft([], [], SOURCE)
        count = min(context.limit, len(chain.token_ids))
        return Draft(chain.token_ids[:count], chain.probabilities[:count], SOURCE)
