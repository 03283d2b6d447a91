"""How many KV blocks fit, from an explicit value or from the memory that is really left.

The limit that counts in a container is the cgroup's, not the machine's. No profiling run: weights
are loaded before this is asked, so what is available already excludes them.
"""

from __future__ import annotations

from pathlib import Path

from twinfire.cache.kv_group import KvLayout
from twinfire.protocol.errors import MemoryTooSmall

HOST_KV_FRACTION = 0.25
"""Share of a host's available memory that KV takes unless told otherwise."""
DEVICE_KV_FRACTION = 0.85
"""Share of what is free on a device of the worker's own; the rest is for activations."""

_NO_LIMIT = 1 << 60


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that this process may still take: the least of machine and cgroup limits.

    Reclaimable page cache counts as available. `root` is the file system root, for tests.
    """
    machine = _meminfo_available(root / "proc/meminfo")
    return min([machine, *(_cgroup_left(folder) for folder in _cgroup_folders(root))])


def num_kv_blocks(
    layout: KvLayout,
    *,
    kv_cache_bytes: int | None,
    max_model_len: int,
    max_num_seqs: int,
    available_bytes: int,
    kv_fraction: float = HOST_KV_FRACTION,
) -> int:
    """Return the number of blocks to allocate.

    Without an explicit size: `kv_fraction` of what is available, no more than all sequences could
    use, and no less than one full sequence. MemoryTooSmall when one sequence does not fit.
    """
    blocks_per_sequence = -(-max_model_len // layout.block_size)
    least_bytes = blocks_per_sequence * layout.bytes_per_block
    if kv_cache_bytes is not None:
        budget = kv_cache_bytes
        source = "the KV cache size given"
    else:
        budget = max(int(available_bytes * kv_fraction), least_bytes)
        budget = min(budget, available_bytes)
        source = "the memory available"
    blocks = min(budget // layout.bytes_per_block, blocks_per_sequence * max_num_seqs)
    if blocks < blocks_per_sequence:
        raise MemoryTooSmall(
            f"{source} ({_mib(budget)}) cannot hold one sequence of max_model_len {max_model_len}: "
            f"that needs {_mib(least_bytes)}. Raise kv-cache-memory or lower max-model-len to at "
            f"most {blocks * layout.block_size}."
        )
    return blocks


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"


def _meminfo_available(path: Path) -> int:
    for line in _lines(path):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return _NO_LIMIT


def _cgroup_folders(root: Path) -> list[Path]:
    """Return this process's cgroup folders from its own up to the root, v2 and v1."""
    folders: list[Path] = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, relative = line.split(":", 2)
        if controllers == "":
            base = root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
        else:
            continue
        here = base / relative.strip().lstrip("/")
        folders.append(here)
        while here != base and base in here.parents:
            here = here.parent
            folders.append(here)
    return folders


def _cgroup_left(folder: Path) -> int:
    limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
    if limit is None:
        return _NO_LIMIT
    used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
    return max(0, limit - used + _reclaimable(folder / "memory.stat"))


def _reclaimable(stat: Path) -> int:
    values = dict(line.split()[:2] for line in _lines(stat))
    return sum(
        int(values.get(name, 0)) for name in ("inactive_file", "active_file", "slab_reclaimable")
    )


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
