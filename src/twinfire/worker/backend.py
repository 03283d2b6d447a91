"""Which kernels a worker computes with, and the model loaded on them.

The native kernels are the choice wherever they can do what was asked; torch is imported only where
it is needed, because that alone takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from twinfire.artifacts.checkpoint import Checkpoint
from twinfire.artifacts.content_key import content_key
from twinfire.artifacts.draft_head import DraftHead
from twinfire.engine.cpus import usable_cores
from twinfire.engine.memory import (
    DEVICE_KV_FRACTION,
    HOST_KV_FRACTION,
    available_memory_bytes,
)
from twinfire.engine.runner import LoadProgress, Runner
from twinfire.kernels.sampling_ops import SamplingOps
from twinfire.protocol.errors import ModelError
from twinfire.protocol.worker_config import WorkerConfig
from twinfire.worker.fingerprint import torch_kernel_version

_MOST_BORROWED_SHARE = 3
"""Borrowed threads for each of a worker's own."""

if TYPE_CHECKING:
    from twinfire.kernels.cpu.weight_cache import WeightCache

FULL_PRECISION_FORMATS = ("f32",)
NATIVE_HEAD_DIM_MULTIPLE = 16


def _nothing_to_save(after_write: Callable[[], None]) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Backend:
    """A loaded model and what draws from its scores."""

    runner: Runner
    sampling_ops: SamplingOps
    dtype: str
    """What the model computes in, for people and for peers that compare."""
    kernel_version: str
    """Changes whenever the same weights and tokens give other results."""
    available_bytes: Callable[[], int] = available_memory_bytes
    """Memory that the KV cache may be taken of, where the model computes."""
    kv_fraction: float = HOST_KV_FRACTION
    """Share of it that is taken unless told otherwise."""
    save_weights: Callable[[Callable[[], None]], None] = _nothing_to_save
    """Keeps for the next start what this one has packed; calls back every few megabytes."""


def load_backend(
    config: WorkerConfig,
    checkpoint: Checkpoint,
    progress: LoadProgress,
    head: DraftHead | None = None,
) -> Backend:
    """Load the model and the draft `head` beside it.

    ModelError when no kernels here can do what is asked.
    """
    obstacle = _native_obstacle(config, checkpoint, head)
    if config.backend == "native" and obstacle is not None:
        raise ModelError(f"the native backend cannot serve this: {obstacle}")
    if config.backend == "torch" or obstacle is not None:
        backend = _torch_backend(config, checkpoint, progress, obstacle, head)
    else:
        backend = _native_backend(config, checkpoint, progress, head)
    checkpoint.forget_pages()
    return backend


def _native_obstacle(
    config: WorkerConfig, checkpoint: Checkpoint, head: DraftHead | None
) -> str | None:
    if config.device != "cpu":
        return f"device {config.device} takes torch"
    if config.dtype in ("f32", "f16"):
        return f"dtype {config.dtype} is not one that the native kernels compute in"
    head_dim = checkpoint.config.head_dim
    if head_dim % NATIVE_HEAD_DIM_MULTIPLE:
        return f"head_dim {head_dim} is not a multiple of {NATIVE_HEAD_DIM_MULTIPLE}"
    if head is not None and head.config.attention != "llama":
        return (
            f"the draft head's attention is {head.config.attention} (multi-head latent attention), "
            "which takes --backend torch"
        )
    return None


def _num_borrowed(num_threads: int, num_cores: int) -> int:
    """Return how many idle cores a worker may use: as many as would make it a few times as fast.

    Each that waits is woken for each step.
    """
    return max(0, min(num_cores - num_threads, _MOST_BORROWED_SHARE * num_threads))


def _native_backend(
    config: WorkerConfig, checkpoint: Checkpoint, progress: LoadProgress, head: DraftHead | None
) -> Backend:
    from twinfire.engine.native_runner import load_native_runner
    from twinfire.kernels.cpu._native import kernel_version
    from twinfire.kernels.cpu.native_sampling import NativeSamplingOps

    num_cores = usable_cores()
    num_threads = config.threads or num_cores
    runner = load_native_runner(
        checkpoint.config,
        checkpoint.weights,
        quantization=config.quantization,
        kv_dtype="int8" if config.kv_cache_dtype == "int8" else "bf16",
        num_threads=num_threads,
        num_borrowed_threads=_num_borrowed(num_threads, num_cores) if config.use_idle_cores else 0,
        progress=progress,
        cache=_weight_cache(config, content_key(checkpoint.weight_files)),
        head=head,
        head_cache=_weight_cache(config, head.content_key) if head is not None else None,
    )
    return Backend(
        runner,
        NativeSamplingOps(),
        runner.weight_format,
        f"native-{kernel_version}",
        save_weights=runner.save_weights,
    )


def _weight_cache(config: WorkerConfig, content: str) -> WeightCache | None:
    from twinfire.kernels.cpu.weight_cache import WeightCache

    if config.weight_cache_dir is None:
        return None
    return WeightCache(Path(config.weight_cache_dir), config.weight_cache_bytes, content)


def _torch_backend(
    config: WorkerConfig,
    checkpoint: Checkpoint,
    progress: LoadProgress,
    reason: str | None,
    head: DraftHead | None,
) -> Backend:
    if config.quantization not in ("auto", "none"):
        why = "" if reason is None else f", but {reason}"
        raise ModelError(f"quantization {config.quantization} takes the native backend{why}")
    dtype = _torch_dtype(config, checkpoint)
    if config.kv_cache_dtype not in ("auto", dtype):
        raise ModelError(
            f"kv-cache-dtype {config.kv_cache_dtype} takes the native backend; "
            f"torch stores keys and values in the model's dtype {dtype}"
        )
    progress("importing torch", 0, 0)
    try:
        from twinfire.engine.torch_runner import free_device_bytes, load_torch_runner
        from twinfire.kernels.torch.sampling import TorchSamplingOps
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModelError(
            f"{reason or 'the torch backend was asked for'}, and torch is not installed: "
            "pip install 'twinfire[torch]'"
        ) from error

    runner = load_torch_runner(
        checkpoint.config,
        checkpoint.weights,
        dtype=dtype,
        num_threads=config.threads or usable_cores(),
        progress=progress,
        device=config.device,
        head=head,
    )
    kernel_version = torch_kernel_version(dtype)
    if config.device == "cpu":
        return Backend(runner, TorchSamplingOps(), dtype, kernel_version)
    return Backend(
        runner,
        TorchSamplingOps(),
        dtype,
        f"{kernel_version}-cuda",
        available_bytes=lambda: free_device_bytes(config.device),
        kv_fraction=DEVICE_KV_FRACTION,
    )


def _torch_dtype(config: WorkerConfig, checkpoint: Checkpoint) -> str:
    if config.dtype != "auto":
        return config.dtype
    return "f32" if checkpoint.config.dtype in FULL_PRECISION_FORMATS else "bf16"
