"""How many cores this process may really use: by affinity and cgroup quota, not by machine."""

from __future__ import annotations

import math
import os
from pathlib import Path


def usable_cores(root: Path = Path("/")) -> int:
    """Return the cores that affinity and the cgroup's CPU quota leave, at least 1."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = _cgroup_quota(root)
    cores = affinity or 1
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def _cgroup_quota(root: Path) -> float | None:
    """Return the quota in cores, None where there is none."""
    base = root / "sys/fs/cgroup"
    try:
        quota, period = (base / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        quota_us = int((base / "cpu/cpu.cfs_quota_us").read_text())
        period_us = int((base / "cpu/cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return quota_us / period_us if quota_us > 0 else None
