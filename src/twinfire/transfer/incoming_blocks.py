"""Which blocks of a prompt are here, which are being read, and which have to be read (again)."""

from __future__ import annotations

from collections.abc import Sequence

from twinfire.transfer.connector import RemoteBlock


class IncomingBlocks:
    """The blocks of one hand-off, by their index in the prompt."""

    def __init__(self, num_blocks: int, num_cached: int) -> None:
        self._num_blocks = num_blocks
        self._num_cached = num_cached
        self._announced: dict[int, RemoteBlock] = {}
        self._reading: dict[int, RemoteBlock] = {}
        self._done: set[int] = set()
        self._lost: set[int] = set()

    @property
    def complete(self) -> bool:
        """Whether every block is in place."""
        return self._num_cached + len(self._done) == self._num_blocks

    @property
    def num_read(self) -> int:
        """Blocks that came from the peer."""
        return len(self._done)

    @property
    def read_indices(self) -> list[int]:
        """Those blocks, in order."""
        return sorted(self._done)

    @property
    def is_waiting_for_news(self) -> bool:
        """Whether a block is neither here nor readable as far as is known."""
        known = self._done | self._reading.keys() | self._announced.keys()
        return self._num_cached + len(known) < self._num_blocks

    @property
    def has_lost_some(self) -> bool:
        """Whether a block was given to somebody else at its owner before it had been read."""
        return bool(self._lost)

    def announce(self, first_block: int, blocks: Sequence[RemoteBlock]) -> None:
        """The peer has these; ValueError when they are not blocks of the prompt."""
        if first_block + len(blocks) > self._num_blocks or first_block < 0:
            raise ValueError(
                f"blocks {first_block} to {first_block + len(blocks)} of {self._num_blocks}"
            )
        for index, block in enumerate(blocks, first_block):
            # Content of a block does not depend on when it was computed, so one read is enough.
            if index < self._num_cached or index in self._done:
                continue
            if self._reading.get(index) != block:
                self._announced[index] = block
            self._lost.discard(index)

    def next_read(self, max_blocks: int) -> dict[int, RemoteBlock]:
        """Return blocks to read now, in the order of the prompt; they count as being read."""
        ready = sorted(self._announced.keys() - self._reading.keys())[:max_blocks]
        read = {index: self._announced.pop(index) for index in ready}
        self._reading.update(read)
        return read

    def read_ended(self, indices: Sequence[int], *, good: bool) -> None:
        """A read is over; blocks that were not good are waited for or read from a newer place."""
        for index in indices:
            del self._reading[index]
            if good:
                self._done.add(index)
                self._announced.pop(index, None)
            elif index not in self._announced:
                self._lost.add(index)
