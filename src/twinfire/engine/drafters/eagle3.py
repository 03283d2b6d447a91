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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from twinfire.engine.draft_runner import DraftedTokens, DraftRunner, Float32Array
from twinfire.engine.drafters.drafter import ChoiceKey, Draft, DraftContext
from twinfire.engine.drafters.head_arrivals import Arrival, HeadArrivals
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
    block_ids: Sequence[int]
    """Where its content is until the next step."""
    kept_row: int
    """Logit row of the head's last call that the next draft comes from."""
    token_ids: list[int]
    probabilities: list[float]
    chance: float

    def add(self, drafted: DraftedTokens, row: int) -> None:
        self.kept_row = row
        self.token_ids.append(int(drafted.token_ids[row]))
        probability = float(drafted.probabilities[row])
        # What another worker sent is not checked; over nonsense a head is sure of nothing.
        self.probabilities.append(probability if 0.0 <= probability <= 1.0 else 0.0)
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
        self._arrivals = HeadArrivals(block_size)
        self._spent_s = 0.0
        self._lost: set[ScheduledSequence] = set()
        """Sequences that the head did not compute in some step, and so cannot draft for."""

    def follow(self, plan: StepPlan, going_on: Mapping[ChoiceKey, ScheduledSequence]) -> None:
        """Compute the head for a step of the target, between its commit and the next `execute`.

        `going_on` are the sequences that draw their next token in the next step.
        """
        self._chains.clear()
        self._drop_ended()
        self._arrivals.computed(plan)
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
            self._begin(sequence, sequence.block_ids, drafted, row)

    def last_features(
        self, plan: StepPlan, leaving: Collection[ScheduledSequence]
    ) -> dict[ScheduledSequence, bytes]:
        """Return what `expect` takes elsewhere, of sequences whose last token `plan` computed.

        Call it after `follow`. Those that the head has not followed are left out.
        """
        rows: dict[ScheduledSequence, int] = {}
        first_row = 0
        for piece in plan.slices:
            if piece.sequence in leaving and piece.sequence not in self._lost:
                rows[piece.sequence] = first_row + piece.known_end - 1 - piece.start
            first_row += piece.num_tokens
        if not rows:
            return {}
        fused = self._head.fused_rows(np.array(list(rows.values()), np.int32))
        return {
            sequence: row.astype("<f4").tobytes() for sequence, row in zip(rows, fused, strict=True)
        }

    def unpack_feature(self, content: bytes) -> Float32Array:
        """Return a row of `last_features`; ValueError when it cannot be this head's."""
        num_bytes = 4 * self._head.fused_width
        if len(content) != num_bytes:
            raise ValueError(
                f"a draft feature of {len(content)} bytes came; this head's have {num_bytes}"
            )
        row = np.frombuffer(content, "<f4").astype(np.float32)
        if not np.isfinite(row).all():
            raise ValueError("a draft feature came whose values are not finite")
        return row

    def expect(
        self, sequence: ScheduledSequence, feature: Float32Array, block_ids: Sequence[int]
    ) -> None:
        """Draft for a sequence that the same head has followed elsewhere up to its last token.

        That token, just drawn, is all that is not computed of it. `block_ids` have its content
        until the next step.
        """
        if sequence.num_computed_tokens == sequence.num_tokens - 1:
            self._arrivals.add(sequence, feature, block_ids)

    def forget_arrivals(self) -> None:
        """Draft for what came only once a step has computed it here."""
        self._arrivals.clear()

    def skip(self, plan: StepPlan) -> None:
        """Let a step pass that the head does not compute; its sequences get no drafts any more."""
        self._chains.clear()
        self.forget_arrivals()
        self.lose([piece.sequence for piece in plan.slices])

    def lose(self, sequences: Sequence[ScheduledSequence]) -> None:
        """Draft no more for sequences of which the head has not computed all."""
        self._drop_ended()
        self._lost.update(sequences)

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """Return the chains; those that are asked for are drafted on first."""
        limits = {context.key: min(context.limit, self._max_drafts) for context in contexts}
        started_s = self._clock()
        self._grow([self._chains[key] for key in limits if key in self._chains], limits)
        wanted = [key for key, limit in limits.items() if limit > 0]
        for arrivals in self._arrivals.take_rounds(wanted):
            self._grow(self._greet(arrivals), limits)
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
        self._arrivals.forget(key)

    def _drop_ended(self) -> None:
        if self._lost:
            self._lost = {one for one in self._lost if one.status is not Status.FINISHED}
        self._arrivals.drop_ended()

    def _greet(self, arrivals: Sequence[Arrival]) -> list[_Chain]:
        """Begin the chains of what came."""
        spans = [
            Span(one.block_ids, one.sequence.num_computed_tokens - 1, one.sequence.tokens[-1:])
            for one in arrivals
        ]
        batch = pack_spans(spans, self._block_size, range(len(spans)))
        drafted = self._head.first_from(batch, np.stack([one.feature for one in arrivals]))
        return [
            self._begin(one.sequence, one.block_ids, drafted, row)
            for row, one in enumerate(arrivals)
        ]

    def _begin(
        self,
        sequence: ScheduledSequence,
        block_ids: Sequence[int],
        drafted: DraftedTokens,
        row: int,
    ) -> _Chain:
        chain = _Chain(sequence, block_ids, row, [], [], 1.0)
        chain.add(drafted, row)
        self._chains[sequence.key] = chain
        return chain

    def _grow(self, chains: Sequence[_Chain], limits: Mapping[ChoiceKey, int]) -> None:
        """Draft on, from rows of the head's last call, as far as chains may hold."""
        while chains := [one for one in chains if self._grows(one, limits[one.sequence.key])]:
            self._draft_on(chains)

    def _grows(self, chain: _Chain, limit: int) -> bool:
        count = len(chain.token_ids)
        position = chain.sequence.num_computed_tokens - 1 + count
        has_room = position < len(chain.block_ids) * self._block_size
        return 0 < count < limit and chain.chance >= _LEAST_CHANCE and has_room

    def _draft_on(self, chains: Sequence[_Chain]) -> None:
        spans = [
            Span(
                chain.block_ids,
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
