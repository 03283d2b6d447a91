"""The decision for one step: which tokens of which sequences are computed.

`StepDraft` is that decision while it is made, `StepPlan` once it stands. Neither owns blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from twinfire.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Slice:
    """Tokens [start, start + num_tokens) of a sequence, the last of which may be drafts."""

    sequence: Sequence
    start: int
    num_tokens: int
    """Drafts included."""
    run_epoch: int
    """The sequence's epoch when this was planned."""
    drafts: tuple[int, ...] = ()
    """Tokens after the sequence's last, to be computed in case that they are what it draws."""

    @property
    def end(self) -> int:
        """One past the last token."""
        return self.start + self.num_tokens

    @property
    def known_end(self) -> int:
        """One past the last token that is no draft."""
        return self.end - len(self.drafts)

    @property
    def reaches_end(self) -> bool:
        """Whether the sequence's next token can be drawn. Meaningless after commit."""
        return self.known_end == self.sequence.num_tokens

    @property
    def is_live(self) -> bool:
        """Whether the result counts: not preempted, aborted or finished since it was planned."""
        return self.run_epoch == self.sequence.run_epoch


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


class StepDraft:
    """A plan being made: slices can be withdrawn and their share of the budget comes back."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        """Tokens that may still be planned."""
        self.slices: dict[Sequence, Slice] = {}
        self.preempted: list[Sequence] = []

    def add(self, sequence: Sequence, num_tokens: int) -> Slice:
        """Plan the sequence's next `num_tokens` tokens."""
        piece = Slice(sequence, sequence.num_computed_tokens, num_tokens, sequence.run_epoch)
        self.slices[sequence] = piece
        self.budget -= num_tokens
        return piece

    def add_drafts(self, sequence: Sequence, drafts: tuple[int, ...]) -> None:
        """Plan drafts after a sequence's last token, which is planned."""
        piece = self.slices[sequence]
        self.slices[sequence] = replace(
            piece, num_tokens=piece.num_tokens + len(drafts), drafts=drafts
        )
        self.budget -= len(drafts)

    def hold_back(self, most: int) -> int:
        """Leave at most `most` tokens to be planned; return the others, to be given back."""
        held = max(0, self.budget - most)
        self.budget -= held
        return held

    def withdraw(self, sequence: Sequence) -> None:
        """Take back what was planned for a sequence, if anything was."""
        piece = self.slices.pop(sequence, None)
        if piece is not None:
            self.budget += piece.num_tokens
