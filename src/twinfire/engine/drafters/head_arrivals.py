"""Sequences from other workers that a draft head here drafts for before a step has computed them.

Until then their last row of the head is made of what its worker sent, and lies where their blocks
have their content: that of a fork is in its parent's until the next step copies it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from twinfire.engine.draft_runner import Float32Array
from twinfire.engine.drafters.drafter import ChoiceKey
from twinfire.scheduler.sequence import Sequence as ScheduledSequence
from twinfire.scheduler.sequence import Status
from twinfire.scheduler.step_plan import StepPlan


@dataclass(slots=True)
class Arrival:
    """One sequence, of which all but the last token is computed."""

    sequence: ScheduledSequence
    run_epoch: int
    """The sequence's when it came; a preempted one is computed anew."""
    feature: Float32Array
    """[fused_width] at its last computed token."""
    block_ids: Sequence[int]
    """Where its content is until the next step."""

    def slot(self, block_size: int) -> int:
        """Return where the head's KV of the last computed token lies."""
        block, offset = divmod(self.sequence.num_computed_tokens - 1, block_size)
        return self.block_ids[block] * block_size + offset


class HeadArrivals:
    """By choice."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._arrivals: dict[ChoiceKey, Arrival] = {}

    def add(
        self, sequence: ScheduledSequence, feature: Float32Array, block_ids: Sequence[int]
    ) -> None:
        """Expect to draft for a sequence as it is now."""
        arrival = Arrival(sequence, sequence.run_epoch, feature, block_ids)
        self._arrivals[sequence.key] = arrival

    def computed(self, plan: StepPlan) -> None:
        """Drop those that a step has computed; the blocks of the others are their own by now."""
        for piece in plan.slices:
            self._arrivals.pop(piece.sequence.key, None)
        for arrival in self._arrivals.values():
            arrival.block_ids = arrival.sequence.block_ids

    def take_rounds(self, keys: Iterable[ChoiceKey]) -> list[list[Arrival]]:
        """Take out those of `keys`, in rounds that write no slot twice.

        Choices of one prompt have the KV of its last token in one place, each with another token
        after it. The first of them comes last, since it is the one that goes on with that place.
        """
        by_slot: defaultdict[int, list[Arrival]] = defaultdict(list)
        for key in keys:
            arrival = self._arrivals.pop(key, None)
            if arrival is not None and arrival.run_epoch == arrival.sequence.run_epoch:
                by_slot[arrival.slot(self._block_size)].insert(0, arrival)
        rounds = zip_longest(*by_slot.values())
        return [[one for one in arrivals if one is not None] for arrivals in rounds]

    def forget(self, key: ChoiceKey) -> None:
        """Drop one; unknown keys are ignored."""
        self._arrivals.pop(key, None)

    def drop_ended(self) -> None:
        """Drop those that have ended."""
        for key, arrival in list(self._arrivals.items()):
            if arrival.sequence.status is Status.FINISHED:
                del self._arrivals[key]

    def clear(self) -> None:
        """Drop all."""
        self._arrivals.clear()
