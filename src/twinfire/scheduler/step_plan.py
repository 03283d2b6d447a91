"""The decision for one step: which tokens of which sequences are computed."""

from __future__ import annotations

from dataclasses import dataclass, field

from twinfire.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Slice:
    """Tokens [start, start + num_tokens) of a sequence."""

    sequence: Sequence
    start: int
    num_tokens: int
    run_epoch: int
    """The sequence's epoch when this was planned."""

    @property
    def end(self) -> int:
        """One past the last token."""
        return self.start + self.num_tokens

    @property
    def reaches_end(self) -> bool:
        """Whether the next token can be drawn from this slice's last row."""
        return self.end == self.sequence.num_tokens


@dataclass(slots=True)
class StepPlan:
    """One step's work. Empty when nothing can run."""

    slices: list[Slice] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    """(source, destination) block ids, copied before the step writes anything."""
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens computed in the step."""
        return sum(piece.num_tokens for piece in self.slices)
