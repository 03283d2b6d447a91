"""Processes as /proc shows them: who descends from whom, memory and CPU time.

Reads only; needs Linux and says so. A process that ends while it is read is left out.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from twinfire.protocol.errors import TwinfireError

PROC = Path("/proc")


class NoProcFilesystem(TwinfireError):
    """Memory of other processes cannot be read here."""


class Process(msgspec.Struct, frozen=True):
    """One process at one moment."""

    pid: int
    parent: int
    session: int
    cpu_s: float
    """User and system time, of ended and waited-for children too."""
    rss_bytes: int
    name: str


def scan_processes() -> list[Process]:
    """Return every process; NoProcFilesystem where there is no Linux /proc."""
    try:
        entries = os.listdir(PROC)
    except OSError:
        raise NoProcFilesystem(
            "no /proc: memory and CPU of processes are measured on Linux"
        ) from None
    page_bytes, ticks_per_s = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
    processes = []
    for entry in entries:
        if not entry.isdigit():
            continue
        try:
            stat = (PROC / entry / "stat").read_text(errors="replace")
        except OSError:
            continue
        processes.append(_parse(stat, page_bytes, ticks_per_s))
    return processes


def _parse(stat: str, page_bytes: int, ticks_per_s: int) -> Process:
    # The name stands in parentheses and may itself hold spaces and parentheses.
    before, _, after = stat.rpartition(")")
    pid, _, name = before.partition("(")
    fields = after.split()
    return Process(
        pid=int(pid),
        parent=int(fields[1]),
        session=int(fields[3]),
        cpu_s=sum(int(ticks) for ticks in fields[11:15]) / ticks_per_s,
        rss_bytes=int(fields[21]) * page_bytes,
        name=name,
    )


def tree_of(root: int, processes: Sequence[Process]) -> list[Process]:
    """Return the root and all that descend from it or belong to the session that it leads."""
    children: dict[int, list[Process]] = {}
    for process in processes:
        children.setdefault(process.parent, []).append(process)
    members = {p.pid: p for p in processes if p.pid == root or p.session == root}
    waiting = list(members)
    while waiting:
        for child in children.get(waiting.pop(), ()):
            if child.pid not in members:
                members[child.pid] = child
                waiting.append(child.pid)
    return list(members.values())


def tree_rss_bytes(root: int) -> int:
    """Return resident memory summed over a tree; pages shared by two processes count twice."""
    return sum(process.rss_bytes for process in tree_of(root, scan_processes()))


def tree_pss_bytes(root: int) -> int | None:
    """Return resident memory with each shared page counted once; None where it may not be read."""
    total = 0
    for process in tree_of(root, scan_processes()):
        own = pss_bytes(process.pid)
        if own is None:
            return None
        total += own
    return total


def pss_bytes(pid: int) -> int | None:
    """Return a process's resident memory, its share of shared pages; None where not readable."""
    try:
        text = (PROC / str(pid) / "smaps_rollup").read_text()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in text.splitlines()[1:])
    return int(fields["Pss"].split()[0]) * 1024
