"""How long a process took for each part of its start, counted from when the system made it."""

from __future__ import annotations

import os
import time

Stage = tuple[str, float]
"""Name and seconds."""

_START_TIME_FIELD = 19
"""Of /proc/self/stat, counted after the command's name."""


class StartupStages:
    """One stage at a time; the first, `process`, began with the process itself."""

    def __init__(self) -> None:
        self._finished: list[Stage] = []
        self._name = "process"
        self._began_s = time.monotonic() - process_age_s()

    def begin(self, name: str) -> None:
        """End the stage that runs and begin another; the same name goes on with it."""
        if name != self._name:
            now_s = time.monotonic()
            self._finished.append((self._name, now_s - self._began_s))
            self._name, self._began_s = name, now_s

    def finish(self) -> tuple[Stage, ...]:
        """End the stage that runs; return all."""
        self.begin("")
        return tuple(self._finished)


def process_age_s() -> float:
    """Return how long this process has existed, to hundredths; 0 where the system does not say."""
    try:
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0.0
    started_s = int(fields[_START_TIME_FIELD]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)
