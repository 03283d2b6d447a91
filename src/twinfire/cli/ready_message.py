"""What `twinfire serve` says once it is ready: where it listens, and a line to paste."""

from __future__ import annotations

import json
import shlex

from twinfire.protocol.messages import WorkerInfo

_ANY_ADDRESS = ("0.0.0.0", "::", "")


def base_url(host: str, port: int, *, is_tls: bool = False) -> str:
    """Return the URL that reaches a server on this machine listening on `host`."""
    reachable = "127.0.0.1" if host in _ANY_ADDRESS else host
    scheme = "https" if is_tls else "http"
    shown = f"[{reachable}]" if ":" in reachable else reachable
    return f"{scheme}://{shown}:{port}"


def ready_message(name: str, url: str, worker: WorkerInfo, memory: str, started_in_s: float) -> str:
    """Return the message, ending in a curl command."""
    kv_gib = worker.num_kv_blocks * worker.kv_bytes_per_block / 2**30
    kv_tokens = worker.num_kv_blocks * worker.block_size
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello!"}]})
    curl = f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d "
    return (
        f"{name} ({worker.architecture}, {worker.dtype}) is ready at {url} after "
        f"{started_in_s:.1f} s; KV cache {kv_gib:.1f} GiB, {kv_tokens:,} tokens. {memory}Try:\n"
        f"  {curl}{shlex.quote(body)}"
    )
