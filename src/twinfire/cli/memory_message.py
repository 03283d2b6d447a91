"""What a server's two processes take beyond weights and KV, for the line that says it is ready."""

from __future__ import annotations

import os

from twinfire.bench.process_tree import pss_bytes
from twinfire.protocol.messages import WorkerInfo


def memory_message(worker: WorkerInfo) -> str:
    """Return a sentence, empty where the system does not tell. KV takes memory as it is written."""
    gateway_bytes, worker_bytes = pss_bytes(os.getpid()), pss_bytes(worker.pid)
    if gateway_bytes is None or worker_bytes is None:
        return ""
    beyond = max(0, worker_bytes - worker.weight_bytes)
    return (
        f"Memory beyond {_mb(worker.weight_bytes)} of weights and KV: "
        f"gateway {_mb(gateway_bytes)}, worker {_mb(beyond)}. "
    )


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.0f} MB"
