"""What must be equal for two workers to exchange KV, read off a loaded model."""

from __future__ import annotations

from importlib.metadata import version

from twinfire.artifacts.checkpoint import Checkpoint
from twinfire.artifacts.content_key import content_key
from twinfire.cache.kv_group import KvGroup, KvLayout
from twinfire.protocol.messages import Fingerprint


def fingerprint(
    checkpoint: Checkpoint, weight_format: str, layout: KvLayout, kernel_version: str
) -> Fingerprint:
    """Return a model's fingerprint; ModelError when its files cannot be read any more."""
    return Fingerprint(
        model_key=content_key(checkpoint.weight_files),
        weight_format=weight_format,
        kv_groups=tuple(map(_describe, layout.groups)),
        block_size=layout.block_size,
        kernel_version=kernel_version,
    )


def torch_kernel_version(dtype: str) -> str:
    """Return what torch's results depend on: its version and how sums are done in this dtype."""
    return f"torch-{version('torch')}-{dtype}"


def _describe(group: KvGroup) -> str:
    return f"{group.name}:{group.num_layers}:{group.num_kv_heads}:{group.head_dim}:{group.dtype}"
