"""Small random EAGLE-3 heads, and what they compute by a plain formula."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from support.tiny_models import ArrayWeights
from twinfire.artifacts.draft_head import DraftHead
from twinfire.artifacts.draft_head_config import DraftHeadConfig
from twinfire.artifacts.model_config import RopeConfig
from twinfire.models.rope import rope_table

BASE = DraftHeadConfig(
    hidden_size=48,
    target_hidden_size=48,
    intermediate_size=80,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    num_layers=1,
    draft_vocab_size=70,
    vocab_size=131,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    feature_layers=(0, 1, 3),
)
"""Beside the models of `tiny_models`, whose heads it does not share the shape of."""
VARIANTS: dict[str, DraftHeadConfig] = {
    "plain": BASE,
    "norm_before_residual": replace(BASE, norm_before_residual=True),
    "norm_before_fc": replace(BASE, norm_before_fc=True),
    "fc_norm_and_output": replace(BASE, fc_norm=True, norm_output=True),
    "both_fc_norms": replace(BASE, fc_norm=True, norm_before_fc=True, norm_before_residual=True),
    "last_hidden": replace(BASE, uses_features=False, feature_layers=()),
    "one_feature": replace(BASE, feature_layers=(2,)),
    "one_normed_feature": replace(BASE, feature_layers=(3,), fc_norm=True),
    "two_layers": replace(BASE, num_layers=2),
    "two_layers_normed": replace(BASE, num_layers=2, norm_output=True, norm_before_residual=True),
    "full_vocabulary": replace(BASE, draft_vocab_size=131),
    "wider": replace(BASE, hidden_size=64, num_heads=3, num_kv_heads=1, head_dim=16),
    "yarn": replace(BASE, rope=RopeConfig(kind="yarn", factor=4.0, original_max_position=64)),
}
"""`wider` has an embedding of its own, as it must."""


def random_head(name: str, seed: int = 0, *, own_embedding: bool = False) -> DraftHead:
    """Return the head of the variant called `name`, with random weights."""
    config = VARIANTS[name]
    random = np.random.default_rng(seed)
    arrays: dict[str, np.ndarray] = {}

    def matrix(tensor: str, rows: int, columns: int, scale: float = 0.2) -> None:
        values = random.standard_normal((rows, columns), np.float32)
        arrays[f"{tensor}.weight"] = values * np.float32(scale)

    def norm(tensor: str, width: int) -> None:
        arrays[f"{tensor}.weight"] = 1 + 0.2 * random.standard_normal(width).astype(np.float32)

    hidden, inner, target = config.hidden_size, config.intermediate_size, config.target_hidden_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    num_features = len(config.feature_layers)
    if config.uses_features:
        matrix("fc", hidden, num_features * target, 0.1)
    if config.norm_before_fc:
        norm("input_norm", num_features * target)
    if config.fc_norm:
        for index in range(num_features):
            norm(f"fc_norm.{index}", target)
    if own_embedding or hidden != target:
        matrix("embed_tokens", config.vocab_size, hidden)
    norm("layers.0.hidden_norm", hidden)
    for index in range(config.num_layers):
        prefix, width = f"layers.{index}", hidden if index else 2 * hidden
        norm(f"{prefix}.input_layernorm", hidden)
        norm(f"{prefix}.post_attention_layernorm", hidden)
        matrix(f"{prefix}.self_attn.q_proj", query, width)
        matrix(f"{prefix}.self_attn.k_proj", kv, width)
        matrix(f"{prefix}.self_attn.v_proj", kv, width)
        matrix(f"{prefix}.self_attn.o_proj", hidden, query)
        matrix(f"{prefix}.mlp.gate_proj", inner, hidden)
        matrix(f"{prefix}.mlp.up_proj", inner, hidden)
        matrix(f"{prefix}.mlp.down_proj", hidden, inner)
    norm("norm", hidden)
    matrix("lm_head", config.draft_vocab_size, hidden, 0.5)
    ids = None
    if config.draft_vocab_size < config.vocab_size:
        ids = np.sort(random.permutation(config.vocab_size)[: config.draft_vocab_size])
    return DraftHead(config, ArrayWeights(arrays), ids, f"{name}-{seed}-{own_embedding}")


@dataclass
class PlainHead:
    """One sequence through a head in float64, one row at a time, by the formula of the paper.

    `embedding` [vocab, hidden] is the one that the head reads.
    """

    head: DraftHead
    embedding: np.ndarray

    def __post_init__(self) -> None:
        config = self.head.config
        self.keys: list[list[np.ndarray]] = [[] for _ in range(config.num_layers)]
        self.values: list[list[np.ndarray]] = [[] for _ in range(config.num_layers)]
        self.feed = np.zeros(config.hidden_size)

    def first(self, features: list[np.ndarray], token: int) -> np.ndarray:
        """Return the draft scores of the next row, from the target's features."""
        config = self.head.config
        if not config.uses_features:
            return self._row(features[0], token)
        if config.fc_norm:
            features = [self._norm(f, f"fc_norm.{index}") for index, f in enumerate(features)]
        joined = np.concatenate(features)
        if config.norm_before_fc:
            joined = self._norm(joined, "input_norm")
        return self._row(self._of("fc") @ joined, token)

    def further(self, token: int) -> np.ndarray:
        """Return the draft scores of the next row, from the head's own output."""
        return self._row(self.feed, token)

    def forget(self, num_rows: int) -> None:
        """Drop the newest rows."""
        for stored in (*self.keys, *self.values):
            del stored[len(stored) - num_rows :]

    def _row(self, g: np.ndarray, token: int) -> np.ndarray:
        config = self.head.config
        embedded = self._norm(self.embedding[token].astype(np.float64), "layers.0.input_layernorm")
        normed = self._norm(g, "layers.0.hidden_norm")
        y = normed if config.norm_before_residual else g
        x = np.concatenate([embedded, normed])
        for index in range(config.num_layers):
            prefix = f"layers.{index}"
            if index:
                x = self._norm(y, f"{prefix}.input_layernorm")
            y = y + self._of(f"{prefix}.self_attn.o_proj") @ self._attend(x, index)
            x = self._norm(y, f"{prefix}.post_attention_layernorm")
            gate, up = (self._of(f"{prefix}.mlp.{part}_proj") @ x for part in ("gate", "up"))
            y = y + self._of(f"{prefix}.mlp.down_proj") @ (gate / (1 + np.exp(-gate)) * up)
        normed = self._norm(y, "norm")
        self.feed = normed if config.norm_output else y
        return self._of("lm_head") @ normed

    def _attend(self, x: np.ndarray, layer: int) -> np.ndarray:
        config = self.head.config
        position = len(self.keys[layer])
        query, key, value = (
            (self._of(f"layers.{layer}.self_attn.{part}_proj") @ x).reshape(-1, config.head_dim)
            for part in "qkv"
        )
        self.keys[layer].append(self._turned(key, position))
        self.values[layer].append(value)
        keys, values = np.stack(self.keys[layer]), np.stack(self.values[layer])
        attended = []
        for index, row in enumerate(self._turned(query, position)):
            kv = index // (config.num_heads // config.num_kv_heads)
            scores = keys[:, kv] @ row / np.sqrt(config.head_dim)
            weights = np.exp(scores - scores.max())
            attended.append(weights / weights.sum() @ values[:, kv])
        return np.concatenate(attended)

    def _turned(self, heads: np.ndarray, position: int) -> np.ndarray:
        table = rope_table(self.head.config.rope, self.head.config.head_dim)
        angles = position * table.inv_freq.astype(np.float64)
        cos, sin = np.cos(angles) * table.attention_factor, np.sin(angles) * table.attention_factor
        first, second = np.split(heads, 2, axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        scale = np.sqrt(np.mean(x**2) + self.head.config.rms_norm_eps)
        return x / scale * self._of(name)

    def _of(self, name: str) -> np.ndarray:
        return self.head.weights.tensor(f"{name}.weight").to_float32().astype(np.float64)
