"""An EAGLE-3 draft head on disk, opened: names, flags and layer numbers are those of one layout."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from twinfire.artifacts.draft_head_config import DraftHeadConfig
from twinfire.artifacts.draft_head_fields import read_draft_head_config
from twinfire.artifacts.draft_head_shapes import check_draft_head
from twinfire.artifacts.draft_head_source import (
    DRAFT_IDS,
    EMBEDDING,
    OUTPUT_HEAD,
    DraftHeadSource,
)
from twinfire.artifacts.file_names import CONFIG_FILE
from twinfire.artifacts.model_config import ModelConfig
from twinfire.artifacts.tensors import WeightSource
from twinfire.protocol.errors import ModelError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class DraftHead:
    """An opened head.

    `weights` has `fc.weight` [hidden, features * target hidden],
    `layers.{i}.self_attn.{q,k,v,o}_proj.weight` (first layer over 2 * hidden),
    `layers.{i}.mlp.{gate,up,down}_proj.weight`,
    `layers.{i}.{input_layernorm,post_attention_layernorm}.weight`, `layers.0.hidden_norm.weight`,
    `norm.weight`, `lm_head.weight` [draft_vocab, hidden]; where the head has its own,
    `embed_tokens.weight` [vocab, hidden]; by flag `input_norm.weight` and `fc_norm.{i}.weight`.
    With MLA, attention is `q_a_proj`, `q_a_layernorm`, `q_b_proj`, `kv_a_proj_with_mqa`,
    `kv_a_layernorm`, `kv_b_proj` and `o_proj`.
    """

    config: DraftHeadConfig
    weights: WeightSource
    draft_ids: npt.NDArray[np.int64] | None
    """[draft_vocab] the target's token of each drafted id, None where they are the same."""
    content_key: str
    """Names what the head computes: equal for the same tensors and settings on any machine."""


def open_draft_head(
    path: Path, target: ModelConfig, *, aux_layer_ids: Sequence[int] | None = None
) -> DraftHead:
    """Open a head's folder for a target; `path` may also be a file in it.

    `aux_layer_ids` are the layers of the target that are read, as numbers of layers passed, in
    place of what the file is taken to mean. ModelError names the field or tensor that is missing,
    unsupported, or does not fit the target, with what was found and what is wanted.
    """
    folder = path if path.is_dir() else path.parent
    if not path.exists() or not (folder / CONFIG_FILE).is_file():
        raise ModelError(f"{path} is no draft head: {folder / CONFIG_FILE} is missing")
    source = DraftHeadSource(folder)
    config, aux = read_draft_head_config(source, target, aux_layer_ids)
    _settle_embedding(source, config)
    check_draft_head(config, source)
    if aux is not None:
        log.info(
            "draft head %s reads the target after %s layers (numbers taken as %s: %s)",
            folder,
            ", ".join(map(str, aux.layers)),
            aux.convention,
            aux.reason,
        )
    content_key = source.content_key(repr(config))
    return DraftHead(config, source, _draft_ids(source, config), content_key)


def _settle_embedding(source: DraftHeadSource, config: DraftHeadConfig) -> None:
    """Keep the head's own embedding if it fits; without one the target's must."""
    if EMBEDDING in source:
        found, wanted = source.shape(EMBEDDING), (config.vocab_size, config.hidden_size)
        if OUTPUT_HEAD not in source:
            source.share(OUTPUT_HEAD, EMBEDDING)
        if found == wanted:
            return
        log.warning(
            "draft head %s: its %s has shape %s, not %s; the target's embedding is used",
            source.folder,
            EMBEDDING,
            list(found),
            list(wanted),
        )
        source.leave_out(EMBEDDING)
    if config.hidden_size != config.target_hidden_size:
        raise ModelError(
            f"{source.folder}: tensor '{EMBEDDING}' is missing; the target's has width "
            f"{config.target_hidden_size}, the head's hidden_size is {config.hidden_size}"
        )


def _draft_ids(source: DraftHeadSource, config: DraftHeadConfig) -> npt.NDArray[np.int64] | None:
    if DRAFT_IDS not in source:
        return None
    draft_rows = np.arange(config.draft_vocab_size, dtype=np.int64)
    ids = source.integers(DRAFT_IDS) + draft_rows
    source.leave_out(DRAFT_IDS)
    outside = np.flatnonzero((ids < 0) | (ids >= config.vocab_size))
    if len(outside):
        row = int(outside[0])
        raise ModelError(
            f"{source.folder}: tensor '{DRAFT_IDS}' takes draft id {row} to token {ids[row]}, "
            f"outside the target's vocabulary of {config.vocab_size}"
        )
    is_same = len(ids) == config.vocab_size and np.array_equal(ids, draft_rows)
    return None if is_same else ids
