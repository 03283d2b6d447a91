"""Takes pages for KV from the system before they are written, beside the steps.

Memory is only taken as blocks are handed out. The first write to a huge page waits for the system
to find and clear it, which in a virtual machine takes milliseconds: in a step, every stream waits.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable

AHEAD_BYTES = 64 << 20
"""Beyond the blocks that have been handed out."""
PIECE_BYTES = 4 << 20
"""Taken in one call."""
NICENESS = 5
"""Beyond the worker's own: behind what computes, before what can wait for ever."""


class KvPopulator:
    """A thread that stays ahead of the blocks that are handed out, which are so in order."""

    def __init__(
        self, populate: Callable[[int, int], None], num_blocks: int, bytes_per_block: int
    ) -> None:
        """`populate(first, count)` may run beside steps."""
        self._populate = populate
        self._num_blocks = num_blocks
        self._num_ahead = max(1, AHEAD_BYTES // bytes_per_block)
        self._piece = max(1, PIECE_BYTES // bytes_per_block)
        self._num_populated = 0
        self._num_wanted = 0
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="populate-kv", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()
        self.follow(0)

    def follow(self, num_handed_out: int) -> None:
        """Stay ahead of the first so many blocks. Never waits."""
        wanted = min(num_handed_out + self._num_ahead, self._num_blocks)
        if wanted > self._num_wanted:
            self._num_wanted = wanted
            self._wake.set()

    def _run(self) -> None:
        if sys.platform == "linux":
            # There a priority belongs to a thread.
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.nice(0) + NICENESS)
        while self._num_populated < self._num_blocks:
            self._wake.wait()
            self._wake.clear()
            while (missing := self._num_wanted - self._num_populated) > 0:
                count = min(missing, self._piece)
                self._populate(self._num_populated, count)
                self._num_populated += count
