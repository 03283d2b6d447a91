"""Who of those that wait may start in the step being planned."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from twinfire.scheduler.block_tables import BlockTables
from twinfire.scheduler.line_up import LineUp
from twinfire.scheduler.prefixes_in_flight import PrefixesInFlight
from twinfire.scheduler.scheduler_config import SchedulerConfig
from twinfire.scheduler.sequence import Sequence
from twinfire.scheduler.step_plan import Slice, StepDraft


class Newcomers:
    """Takes them from the queue in their turns; in a step nobody passes one that finds no room."""

    def __init__(
        self,
        config: SchedulerConfig,
        tables: BlockTables,
        line: LineUp,
        draft: StepDraft,
        prefilling: Iterable[Sequence],
        go_on: Callable[[Sequence], None],
    ) -> None:
        """`prefilling` are the running sequences whose prompts go on; `go_on` plans one of them."""
        self._config = config
        self._tables = tables
        self._line = line
        self._draft = draft
        self._prefilling = prefilling
        self._go_on = go_on
        self._in_flight: PrefixesInFlight | None = None
        self._delayed: list[Sequence] = []
        self._is_full = False

    def take(self, before: Sequence | None = None) -> tuple[Sequence, list[int]] | None:
        """Return the next that may start, with the cached blocks that it starts from.

        None when there is none, or its turn is not before that of `before`.
        """
        while self._has_room():
            sequence = self._line.waiting.peek()
            if sequence is None or (before is not None and not self._is_before(sequence, before)):
                return None
            if self._waits_for_its_prefix(sequence):
                self._line.waiting.remove(sequence)
                self._delayed.append(sequence)
                continue
            # Looked up anew at each attempt: blocks found by a failed one may be gone.
            prefix = self._tables.find_prefix(sequence)
            num_spare = self._line.num_blocks_promised() + self._line.watermark()
            if self._tables.fits(sequence, prefix, num_spare):
                self._line.waiting.remove(sequence)
                return sequence, prefix
            self._is_full = True
        return None

    def started(self, piece: Slice) -> None:
        """Note what is computed of one that was taken."""
        self._prefixes().add(piece.sequence, piece.start, piece.known_end)

    def close(self) -> None:
        """Give back those that wait for what others compute."""
        for sequence in self._delayed:
            self._line.waiting.push(sequence)

    def _has_room(self) -> bool:
        if self._is_full or not (self._line.waiting and self._draft.budget):
            return False
        # What was just taken from one sequence must not go to a newcomer.
        return not self._draft.preempted and self._line.has_place(len(self._delayed))

    def _is_before(self, waiting: Sequence, running: Sequence) -> bool:
        return self._line.turn(waiting) < self._line.turn(running)

    def _waits_for_its_prefix(self, sequence: Sequence) -> bool:
        """Whether another computes the sequence's next block; it does so now, in its place."""
        if not self._config.enable_prefix_cache:
            return False
        owner = self._prefixes().owner(sequence)
        if owner is None:
            return False
        if owner not in self._draft.slices:
            self._go_on(owner)
        return owner in self._draft.slices

    def _prefixes(self) -> PrefixesInFlight:
        if self._in_flight is None:
            self._in_flight = PrefixesInFlight(self._tables.cache)
            for sequence in self._prefilling:
                self._in_flight.add(sequence, sequence.num_computed_tokens, sequence.num_tokens)
        return self._in_flight
