"""What must be equal for two workers to exchange KV, read off a loaded model."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version

from twinfire.artifacts.checkpoint import Checkpoint
from twinfire.artifacts.content_key import content_key
from twinfire.artifacts.draft_head import DraftHead
from twinfire.cache.kv_group import KvGroup, KvLayout
from twinfire.protocol.messages import Fingerprint
from twinfire.transfer.shared_blocks import target_part


def fingerprint(
    checkpoint: Checkpoint,
    weight_format: str,
    layout: KvLayout,
    kernel_version: str,
    head: DraftHead | None,
) -> Fingerprint:
    """Return the fingerprint of a model and the head beside it.

    ModelError when the model's files cannot be read any more.
    """
    target = target_part(layout)
    return Fingerprint(
        model_key=content_key(checkpoint.weight_files),
        weight_format=weight_format,
        kv_groups=tuple(map(_describe, target.groups)),
        block_size=layout.block_size,
        kernel_version=kernel_version,
        draft=_describe_draft(layout.groups[len(target.groups) :], head),
    )


def torch_kernel_version(dtype: str) -> str:
    """Return what torch's results depend on: its version and how sums are done in this dtype."""
    return f"torch-{version('torch')}-{dtype}"


def _describe_draft(groups: Sequence[KvGroup], head: DraftHead | None) -> str:
    return "" if head is None else ",".join((*map(_describe, groups), head.content_key))


def _describe(group: KvGroup) -> str:
    return group.text
