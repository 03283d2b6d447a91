"""The machine that a run happened on, and how much of it other processes took meanwhile.

Reads /proc; a description leaves out what another system does not offer, CPU shares need Linux.
Never judges: callers decide which share of foreign work spoils a run.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

import msgspec

from twinfire.bench.process_tree import scan_processes, tree_of

PROC = Path("/proc")


class Machine(msgspec.Struct, frozen=True):
    """What a result must say of where it was measured."""

    cpu: str
    cores: int
    """That this process may use."""
    memory_bytes: int | None
    kernel: str
    python: str
    load_average_1m: float | None


def describe_machine() -> Machine:
    """Return this machine's description."""
    return Machine(
        cpu=_field("cpuinfo", "model name") or platform.processor() or platform.machine(),
        cores=usable_cores(),
        memory_bytes=_memory_bytes(),
        kernel=platform.platform(),
        python=platform.python_version(),
        load_average_1m=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    )


def usable_cores() -> int:
    """Return the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class ForeignCpu:
    """Measures the share of the cores that this process and its descendants did not use."""

    def __init__(self) -> None:
        self._busy_s, self._total_s = _cpu_times_s()
        self._own_s = _own_cpu_s()

    def share(self) -> float:
        """Return foreign CPU time over all CPU time since construction, 0 to 1."""
        busy_s, total_s = _cpu_times_s()
        elapsed_s = total_s - self._total_s
        foreign_s = (busy_s - self._busy_s) - (_own_cpu_s() - self._own_s)
        return min(max(foreign_s / elapsed_s, 0.0), 1.0) if elapsed_s > 0 else 0.0


def _own_cpu_s() -> float:
    return sum(process.cpu_s for process in tree_of(os.getpid(), scan_processes()))


def _cpu_times_s() -> tuple[float, float]:
    """Return (busy, busy + idle) seconds summed over cores since boot."""
    fields = (PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]
    ticks = [int(field) for field in fields]
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    idle = ticks[3] + ticks[4]
    return (sum(ticks) - idle) / ticks_per_s, sum(ticks) / ticks_per_s


def _memory_bytes() -> int | None:
    kilobytes = _field("meminfo", "MemTotal")
    return int(kilobytes.split()[0]) * 1024 if kilobytes else None


def _field(file: str, name: str) -> str | None:
    try:
        lines = (PROC / file).read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None
