"""Sequences that come from another worker, until they run like any other.

First they are reserved: they hold blocks that somebody else fills. Once filled they are ready and
wait for one of the places to run, in the order of their coming, keeping their blocks. Neither is
ever preempted.
"""

from __future__ import annotations

from collections.abc import Collection

from twinfire.scheduler.sequence import Sequence, Status


class Arrivals:
    """Both kinds, and their status."""

    def __init__(self) -> None:
        # Dicts with no values: sets that keep their order.
        self._reserved: dict[Sequence, None] = {}
        self._ready: dict[Sequence, None] = {}

    def __len__(self) -> int:
        return len(self._reserved) + len(self._ready)

    @property
    def reserved(self) -> Collection[Sequence]:
        """Those whose blocks are being filled."""
        return self._reserved.keys()

    @property
    def waiting_for_a_place(self) -> Collection[Sequence]:
        """Those that could run."""
        return self._ready.keys()

    def reserve(self, sequence: Sequence) -> None:
        """Add one that holds its blocks."""
        sequence.status = Status.RESERVED
        self._reserved[sequence] = None

    def filled(self, sequence: Sequence) -> None:
        """The blocks of a reserved one are filled."""
        assert sequence.status is Status.RESERVED, f"{sequence.key} is not reserved"
        del self._reserved[sequence]
        self.ready(sequence)

    def ready(self, sequence: Sequence) -> None:
        """Add one that could run."""
        sequence.status = Status.READY
        self._ready[sequence] = None

    def pop_ready(self) -> Sequence | None:
        """Take out the one that has been ready longest, None when none is."""
        sequence = next(iter(self._ready), None)
        if sequence is not None:
            del self._ready[sequence]
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Take one out, whichever it is."""
        del (self._reserved if sequence.status is Status.RESERVED else self._ready)[sequence]

    def check_integrity(self) -> None:
        """Raise AssertionError when a status is wrong."""
        for sequence in self._reserved:
            assert sequence.status is Status.RESERVED, f"{sequence.key} is {sequence.status}"
        for sequence in self._ready:
            assert sequence.status is Status.READY, f"{sequence.key} is {sequence.status}"
