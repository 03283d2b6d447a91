"""KV size and core count under container limits, read from a file system made for the test."""

from __future__ import annotations

from pathlib import Path

import pytest

from twinfire.cache.kv_group import KvGroup, KvLayout
from twinfire.engine.cpus import usable_cores
from twinfire.engine.memory import available_memory_bytes, num_kv_blocks
from twinfire.protocol.errors import MemoryTooSmall

GIB = 1 << 30
LAYOUT = KvLayout((KvGroup("target", 2, 2, 64, "bf16"),), block_size=32)
BLOCK_BYTES = 2 * 2 * 2 * 32 * 64 * 2


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": f"MemAvailable: {8 * GIB // 1024} kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_cgroup_the_machine_counts(tmp_path: Path) -> None:
    assert available_memory_bytes(write(tmp_path, {})) == 8 * GIB


def test_cgroup_v2_limit_less_use_plus_reclaimable(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/worker\n",
            "sys/fs/cgroup/pod/worker/memory.max": "max\n",
            "sys/fs/cgroup/pod/memory.max": f"{2 * GIB}\n",
            "sys/fs/cgroup/pod/memory.current": f"{GIB}\n",
            "sys/fs/cgroup/pod/memory.stat": f"anon 5\ninactive_file {GIB // 4}\nactive_file 0\n",
        },
    )
    assert available_memory_bytes(root) == GIB + GIB // 4


def test_cgroup_v1_limit(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "12:cpu,cpuacct:/x\n7:memory:/docker/abc\n",
            "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes": f"{GIB // 2}\n",
        },
    )
    assert available_memory_bytes(root) == GIB // 2


def test_a_container_that_sees_its_own_root_uses_the_root_files(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {"proc/self/cgroup": "0::/elsewhere\n", "sys/fs/cgroup/memory.max": f"{GIB}\n"},
    )
    assert available_memory_bytes(root) == GIB


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ({"sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        (
            {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "90000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            1,
        ),
        ({}, None),
    ],
)
def test_cores_follow_the_quota(tmp_path: Path, files: dict[str, str], cores: int | None) -> None:
    assert usable_cores(write(tmp_path, files)) == (cores or usable_cores(tmp_path / "nothing"))


def blocks(**kw: int | None) -> int:
    settings = {"kv_cache_bytes": None, "max_model_len": 1000, "max_num_seqs": 4}
    return num_kv_blocks(LAYOUT, available_bytes=GIB, **{**settings, **kw})  # type: ignore[arg-type]


def test_default_is_what_all_sequences_can_use_or_a_quarter() -> None:
    assert blocks() == 4 * 32
    assert blocks(max_num_seqs=10_000) == GIB // 4 // BLOCK_BYTES
    assert blocks(kv_cache_bytes=50 * BLOCK_BYTES + 1) == 50


def test_one_sequence_fits_even_beyond_a_quarter() -> None:
    long = 32 * (GIB // 2 // BLOCK_BYTES)
    assert blocks(max_model_len=long) == long // 32


def test_too_small_says_what_is_needed_and_what_would_fit() -> None:
    with pytest.raises(MemoryTooSmall, match=r"needs 1 MiB.*at most 160") as error:
        blocks(kv_cache_bytes=5 * BLOCK_BYTES)
    assert "max_model_len 1000" in str(error.value)
    with pytest.raises(MemoryTooSmall, match="memory available"):
        blocks(max_model_len=32 * (2 * GIB // BLOCK_BYTES))
