"""Small random EAGLE-3 heads with latent attention, and what they compute when nothing is latent.

After the published Kimi heads (nvidia/Kimi-K2.5-Thinking-Eagle3,
lightseekorg/kimi-k2.6-eagle3.1-mla) and DeepSeek-V3's own inference code, which turns pairs of
neighbours as complex numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from support.random_heads import BASE, PlainHead
from support.tiny_models import ArrayWeights
from twinfire.artifacts.draft_head import DraftHead
from twinfire.artifacts.draft_head_config import DraftHeadConfig, MlaSizes
from twinfire.artifacts.draft_head_shapes import draft_head_shapes
from twinfire.artifacts.model_config import RopeConfig

SIZES = MlaSizes(
    q_lora_rank=20, kv_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10
)
YARN = RopeConfig(theta=50_000.0, kind="yarn", factor=64.0, original_max_position=32, beta_fast=1.0)
YARN_SIZES = replace(SIZES, score_factor=(0.1 * float(np.log(64.0)) + 1.0) ** 2)
LATENT = replace(
    BASE, num_kv_heads=4, head_dim=20, attention="mla", mla=SIZES, draft_vocab_size=131
)
LATENT_VARIANTS: dict[str, DraftHeadConfig] = {
    "latent": LATENT,
    "kimi": replace(LATENT, rope=YARN, mla=YARN_SIZES),
    "kimi_3_1": replace(LATENT, rope=YARN, mla=YARN_SIZES, fc_norm=True, norm_output=True),
    "whole_queries": replace(LATENT, mla=replace(SIZES, q_lora_rank=None)),
    "halves": replace(LATENT, mla=replace(SIZES, rope_interleaved=False)),
    "normed_residual": replace(LATENT, norm_before_residual=True, draft_vocab_size=70),
    "two_layers": replace(LATENT, num_layers=2),
    "last_hidden": replace(LATENT, uses_features=False, feature_layers=()),
    "odd_sizes": replace(
        LATENT, num_heads=3, num_kv_heads=3, head_dim=19, mla=MlaSizes(9, 11, 13, 6, 7)
    ),
}


def latent_head(name: str, seed: int = 0) -> DraftHead:
    """Return the head of the variant called `name`, with random weights."""
    return latent_head_of(LATENT_VARIANTS[name], name, seed)


def latent_head_of(config: DraftHeadConfig, name: str, seed: int = 0) -> DraftHead:
    """Return a head of any sizes."""
    random = np.random.default_rng(seed)
    arrays = {}
    for tensor, shape in draft_head_shapes(config).items():
        values = random.standard_normal(shape, np.float32)
        scale = np.float32({"fc.weight": 0.1, "lm_head.weight": 0.5}.get(tensor, 0.2))
        arrays[tensor] = 1 + scale * values if len(shape) == 1 else scale * values
    ids = None
    if config.draft_vocab_size < config.vocab_size:
        ids = np.sort(random.permutation(config.vocab_size)[: config.draft_vocab_size])
    return DraftHead(config, ArrayWeights(arrays), ids, f"{name}-{seed}")


@dataclass
class ExpandedHead(PlainHead):
    """`PlainHead` with latent attention: keys and values are made and stored for each head."""

    def _attend(self, x: np.ndarray, layer: int) -> np.ndarray:
        config = self.head.config
        mla, prefix = config.mla, f"layers.{layer}.self_attn"
        assert mla is not None
        position = len(self.keys[layer])
        nope = mla.qk_nope_head_dim
        if mla.q_lora_rank is None:
            query = self._of(f"{prefix}.q_proj") @ x
        else:
            low = self._norm(self._of(f"{prefix}.q_a_proj") @ x, f"{prefix}.q_a_layernorm")
            query = self._of(f"{prefix}.q_b_proj") @ low
        query = query.reshape(config.num_heads, -1)
        down = self._of(f"{prefix}.kv_a_proj_with_mqa") @ x
        latent = self._norm(down[: mla.kv_lora_rank], f"{prefix}.kv_a_layernorm")
        made = (self._of(f"{prefix}.kv_b_proj") @ latent).reshape(config.num_heads, -1)
        turned = self._turned_pairs(down[None, mla.kv_lora_rank :], position)
        shared = np.repeat(turned, config.num_heads, axis=0)
        self.keys[layer].append(np.concatenate([made[:, :nope], shared], axis=1))
        self.values[layer].append(made[:, nope:])
        query = np.concatenate(
            [query[:, :nope], self._turned_pairs(query[:, nope:], position)], axis=1
        )
        keys, values = np.stack(self.keys[layer]), np.stack(self.values[layer])
        scores = np.einsum("hd,khd->hk", query, keys) / np.sqrt(config.head_dim) * mla.score_factor
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        return np.einsum("hk,khd->hd", weights, values).reshape(-1)

    def _turned_pairs(self, heads: np.ndarray, position: int) -> np.ndarray:
        mla, rope = self.head.config.mla, self.head.config.rope
        assert mla is not None
        if not mla.rope_interleaved:
            half = heads.shape[1] // 2
            first, second = heads[:, :half], heads[:, half:]
            turned = (first + 1j * second) * self._unit(rope, heads.shape[1], position)
            return np.concatenate([turned.real, turned.imag], axis=1)
        turned = (heads[:, ::2] + 1j * heads[:, 1::2]) * self._unit(rope, heads.shape[1], position)
        return np.stack([turned.real, turned.imag], axis=2).reshape(heads.shape)

    @staticmethod
    def _unit(rope: RopeConfig, width: int, position: int) -> np.ndarray:
        return rope.attention_factor * np.exp(1j * position * inverse_frequencies(rope, width))


def inverse_frequencies(rope: RopeConfig, width: int) -> np.ndarray:
    """Return radians a token of every pair, by YaRN's own words (arXiv:2309.00071, section 3.2).

    A pair that turns more than `beta_fast` times over the trained window keeps its frequency, one
    that turns less than `beta_slow` times is divided by `factor`; between the two, in order of the
    pairs, a straight line whose ends are whole pairs.
    """
    pairs = np.arange(width // 2)
    plain = rope.theta ** (-2.0 * pairs / width)
    if rope.kind == "default":
        return plain

    def pair_that_turns(times: float) -> float:
        # window * theta ** (-2 p / width) = 2 pi times, solved for p.
        turns = rope.original_max_position / (2 * np.pi * times)
        return float(width / 2 * np.log(turns) / np.log(rope.theta))

    fast = max(np.floor(pair_that_turns(rope.beta_fast)), 0)
    slow = min(np.ceil(pair_that_turns(rope.beta_slow)), width - 1)
    slowed = np.clip((pairs - fast) / max(slow - fast, 1e-3), 0, 1)
    return plain * (1 - slowed) + plain / rope.factor * slowed
