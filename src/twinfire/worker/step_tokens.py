"""How many tokens a step may have, which is how long a prompt can hold up streams and others."""

from __future__ import annotations

from twinfire.engine.cpus import usable_cores
from twinfire.protocol.worker_config import WorkerConfig

_CPU_TOKENS_PER_THREAD = 256
"""Larger steps are no faster there (`benchmarks/results/step-tokens.md`)."""
_MOST_CPU_TOKENS = 2048
_TOKENS_BESIDE_STREAMS = 64
"""For each thread of a decode worker: its streams wait a tenth of a second, and not half a one."""
_GPU_TOKENS = 4096


def step_tokens(config: WorkerConfig) -> int:
    """Return the token budget of a step: as told, else what suits device and threads.

    It is at least `max_num_seqs`, so that no stream ever skips a step.
    """
    suited = _GPU_TOKENS
    if config.device == "cpu":
        suited = min(_CPU_TOKENS_PER_THREAD * _num_threads(config), _MOST_CPU_TOKENS)
    return max(config.max_num_seqs, config.max_num_batched_tokens or suited)


def prompt_tokens_beside_streams(config: WorkerConfig) -> int | None:
    """Return the most prompt tokens in a step that streams wait for; None is no limit."""
    told = config.max_prompt_tokens_beside_streams
    if told is not None or config.role != "decode" or config.device != "cpu":
        return told
    return _TOKENS_BESIDE_STREAMS * _num_threads(config)


def _num_threads(config: WorkerConfig) -> int:
    return config.threads or usable_cores()
