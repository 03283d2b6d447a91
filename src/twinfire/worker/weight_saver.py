"""Keeps packed weights for the next start, after this one is ready and behind everything else."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable

LOWEST_PRIORITY = 19
PAUSE_S = 0.01
"""After every few megabytes: what is served now goes first, at the disk as well."""
END_LIMIT_S = 5.0
"""How long a worker that ends waits for a file that is almost written."""


class WeightSaver:
    """A thread that runs `save` once."""

    def __init__(self, save: Callable[[Callable[[], None]], None]) -> None:
        self._save = save
        self._thread = threading.Thread(target=self._run, name="save-weights", daemon=True)
        self._hurry = threading.Event()

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def finish(self) -> None:
        """Write what is left without pauses, for a while."""
        self._hurry.set()
        self._thread.join(END_LIMIT_S)

    def _run(self) -> None:
        if sys.platform == "linux":
            # There a priority belongs to a thread.
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        self._save(self._pause)

    def _pause(self) -> None:
        if not self._hurry.is_set():
            time.sleep(PAUSE_S)
