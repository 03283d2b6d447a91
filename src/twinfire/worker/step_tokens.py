"""How many tokens a step may have, which is how long a prompt can hold up streams and others."""

from __future__ import annotations

from twinfire.engine.cpus import usable_cores
from twinfire.protocol.worker_config import WorkerConfig

_CPU_TOKENS_PER_THREAD = 256
"""Larger steps are no faster there (`benchmarks/results/step-tokens.md`)."""
_MOST_CPU_TOKENS = 2048
_GPU_TOKENS = 4096


def step_tokens(config: WorkerConfig) -> int:
    """Return the token budget of a step: as told, else what suits device and threads.

    It is at least `max_num_seqs`, so that no stream ever skips a step.
    """
    suited = _GPU_TOKENS
    if config.device == "cpu":
        num_threads = config.threads or usable_cores()
        suited = min(_CPU_TOKENS_PER_THREAD * num_threads, _MOST_CPU_TOKENS)
    return max(config.max_num_seqs, config.max_num_batched_tokens or suited)
