"""NIXL as the connector of a cluster that `twinfire up` starts and looks after."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from support.chaos_site import HELD, until
from support.completion_client import client_session, complete
from support.serve_process import ServeProcess, up_process

pytest.importorskip("nixl_cu12", reason="NIXL is not installed (extra `nixl`)")
CLUSTER = """
[gateway]
pd_policy = "always"
[model]
model = "{model}"
connector = "nixl"
prefill = {{ count = 1, threads = 1, kv_cache_memory = 1_000_000 }}
decode = {{ count = 1, threads = 1, kv_cache_memory = 1_000_000 }}
"""


@pytest.mark.slow
def test_nixl_moves_prompts_and_a_killed_worker_comes_back(
    tmp_path: Path, tiny_model: Path, reference_url: str
) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(CLUSTER.format(model=tiny_model))
    with up_process(tmp_path, str(file)) as cluster:
        asyncio.run(_steps(cluster, reference_url))


async def _steps(cluster: ServeProcess, reference_url: str) -> None:
    async with client_session(30) as session:

        async def is_same(seed: int, **options: Any) -> None:
            body = {"prompt": [3 + (seed + i) % 200 for i in range(300)], "seed": seed, **options}
            expected = await complete(session, reference_url, {"max_tokens": 30, **body})
            answer = await complete(session, cluster.url, {"max_tokens": 30, **body})
            assert answer.difference(expected) is None

        async def has_both() -> object:
            workers = json.loads(cluster.get("/cluster/status")[1])["workers"]
            return None if len(workers) == 2 else workers

        async def is_held() -> object:
            found = HELD.findall(cluster.get("/metrics")[1].decode())
            return [entry for entry in found if float(entry[2])] or None

        await is_same(1)
        await is_same(2, n=3, stream=True)
        assert _moved_bytes(cluster) > 0
        for worker in json.loads(cluster.get("/cluster/status")[1])["workers"]:
            streaming = asyncio.create_task(is_same(worker["pid"], max_tokens=400, stream=True))
            await asyncio.sleep(0.2)
            os.kill(worker["pid"], signal.SIGKILL)
            await streaming
            await until(has_both, 30, "the killed worker is back")
        moved = _moved_bytes(cluster)
        await is_same(3)
        assert _moved_bytes(cluster) > moved
        await until(is_held, 5, "nothing is held")


def _moved_bytes(cluster: ServeProcess) -> float:
    found = re.findall(
        r"^twinfire:transfer_bytes_total{[^}]*} (\S+)$",
        cluster.get("/metrics")[1].decode(),
        re.MULTILINE,
    )
    return sum(map(float, found))
