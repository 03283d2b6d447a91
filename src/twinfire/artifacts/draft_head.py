"""An EAGLE-3 draft head on disk, opened: names, flags and layer numbers are those of one layout."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twinfire.artifacts.draft_head_config import DraftHeadConfig
from twinfire.artifacts.tensors import WeightSource


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
