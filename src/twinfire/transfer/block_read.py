"""One read that was asked of a connector, in chunks, and that it ends exactly once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from twinfire.transfer.connector import ReadDone, ReadFailed, RemoteBlock

log = logging.getLogger(__name__)


class BlockRead:
    """Blocks of a peer and where they go. The reading thread's own once it has been handed over."""

    def __init__(
        self, remote: Sequence[RemoteBlock], local_ids: Sequence[int], on_done: ReadDone
    ) -> None:
        if len(remote) != len(local_ids):
            raise ValueError(f"{len(remote)} blocks cannot go into {len(local_ids)}")
        self._remote = list(remote)
        self._local_ids = list(local_ids)
        self._on_done = on_done
        self._num_left = len(self._remote)
        self.ended = False
        """Whether `on_done` has been told; nothing may be imported any more."""

    def chunks(self, max_blocks: int) -> list[ReadChunk]:
        """Return it in parts of at most so many blocks."""
        return [
            ReadChunk(
                self,
                self._remote[start : start + max_blocks],
                self._local_ids[start : start + max_blocks],
            )
            for start in range(0, len(self._remote), max_blocks)
        ]

    def imported(self, num_blocks: int) -> None:
        """Count blocks that are in place; the last ones end the read."""
        self._num_left -= num_blocks
        if self._num_left == 0:
            self.end(None)

    def end(self, failure: ReadFailed | None) -> None:
        """Tell whoever asked, unless that has been done."""
        if self.ended:
            return
        self.ended = True
        try:
            self._on_done(failure)
        except Exception:
            log.exception("what waits for a read failed")


@dataclass(frozen=True, slots=True, eq=False)
class ReadChunk:
    """What one request asks for."""

    read: BlockRead
    remote: list[RemoteBlock]
    local_ids: list[int]
