"""Has the blocks of incoming hand-offs read, in the order of the prompt."""

from __future__ import annotations

from collections.abc import Callable

from twinfire.transfer.connector import ReadFailed
from twinfire.transfer.fault_points import FaultPoints
from twinfire.transfer.incoming import Incoming, Stage
from twinfire.transfer.ports import BlockReader

MAX_READ_BLOCKS = 64
MAX_READS = 2
"""Reads under way for one hand-off: few, so that an aborted one is free soon."""


class BlockFiller:
    """Reads what has been announced.

    `filled` is called when a good read has ended, `failed(incoming, reason)` when blocks are not to
    be had, and `drained` when the last read of a quarantined hand-off has ended.
    """

    def __init__(
        self,
        reader: BlockReader,
        filled: Callable[[Incoming], None],
        failed: Callable[[Incoming, str], None],
        drained: Callable[[Incoming], None],
        *,
        clock: Callable[[], float],
        faults: FaultPoints,
    ) -> None:
        self._reader = reader
        self._filled = filled
        self._failed = failed
        self._drained = drained
        self._clock = clock
        self._faults = faults

    def read_more(self, incoming: Incoming) -> None:
        """Begin reads of what is announced and not yet here."""
        assert incoming.reservation is not None
        while incoming.num_reads < MAX_READS:
            read = incoming.blocks.next_read(MAX_READ_BLOCKS)
            if not read:
                return
            self._faults.hit("receiver.reading")
            incoming.num_reads += 1
            indices = list(read)
            local_ids = [incoming.reservation.block_ids[index] for index in indices]

            def on_end(error: ReadFailed | None, indices: list[int] = indices) -> None:
                self._on_read_ended(incoming, indices, error)

            self._reader.start(incoming.peer, list(read.values()), local_ids, on_end)

    def _on_read_ended(
        self, incoming: Incoming, indices: list[int], error: ReadFailed | None
    ) -> None:
        self._faults.hit("receiver.read")
        incoming.num_reads -= 1
        if incoming.stage is Stage.QUARANTINED:
            if incoming.num_reads == 0:
                self._drained(incoming)
            return
        incoming.blocks.read_ended(indices, good=error is None)
        if error is not None and not error.stale:
            self._failed(incoming, f"blocks could not be read: {error}")
            return
        if incoming.blocks.has_lost_some:
            if incoming.commit is not None:
                self._failed(incoming, "blocks changed after they had been committed")
                return
            # Their prompt was preempted there; they are announced again once they are computed.
            incoming.stale_since_s = incoming.stale_since_s or self._clock()
        if incoming.blocks.complete:
            incoming.complete_s = self._clock()
        self.read_more(incoming)
        self._filled(incoming)
