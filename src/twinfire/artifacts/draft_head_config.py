"""The description of an EAGLE-3 draft head, the same for every published layout.

Owns sizes and variants only. What a file calls them is `draft_head_fields`' business, and which
layers of the target are read is always told as numbers of layers passed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from twinfire.artifacts.model_config import RopeConfig

DraftAttention = Literal["llama", "mla"]


@dataclass(frozen=True, slots=True)
class MlaSizes:
    """Widths of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), in elements."""

    q_lora_rank: int | None
    """None where queries are not compressed."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    score_factor: float = 1.0
    """Multiplies the attention scores beside 1 / sqrt(head width): yarn's mscale, squared."""
    rope_interleaved: bool = True
    """Rows of the turned part come in pairs (2i, 2i + 1), as DeepSeek's; else as i, i + half."""

    @property
    def cached_width(self) -> int:
        """Elements that the cache keeps of a token and layer: latent row and turned key."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True)
class DraftHeadConfig:
    """Sizes and variants of a head. Widths in elements."""

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Of queries and keys; for MLA both their parts together."""
    num_layers: int
    """The first layer reads embedding and feature side by side, later ones the layer before."""
    draft_vocab_size: int
    vocab_size: int
    """The target's."""
    rms_norm_eps: float
    rope: RopeConfig
    """As the head was trained; the engine sizes its tables by its own longest context."""
    feature_layers: tuple[int, ...]
    """Layers of the target passed where a feature is taken, 0 the embedding, ascending.

    Empty without `uses_features`.
    """
    norm_before_residual: bool = False
    """The attention's residual is the normed feature (`hidden_norm`) instead of the feature."""
    norm_before_fc: bool = False
    """`input_norm` over all features side by side, before `fc`."""
    fc_norm: bool = False
    """`fc_norm.{i}` over each feature, before `fc`."""
    norm_output: bool = False
    """The next draft reads the feature after the final norm instead of before it."""
    uses_features: bool = True
    """False: no `fc`; the feature is the target's final state, normed, as its output head reads."""
    attention: DraftAttention = "llama"
    mla: MlaSizes | None = None
    """With `attention` mla only."""
