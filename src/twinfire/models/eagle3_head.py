"""The EAGLE-3 draft head over the op set (arXiv:2503.01840), in all its published variants.

A decoder layer or two that read, row by row, a feature of the target and the embedding of the token
after it, and score the token after that. Owns the order of the ops and the references to its
weights; holds no tensor and never looks at a value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from twinfire.artifacts.draft_head_config import DraftHeadConfig
from twinfire.artifacts.draft_head_shapes import draft_head_shapes
from twinfire.artifacts.draft_head_source import EMBEDDING
from twinfire.artifacts.tensors import MappedTensor, WeightSource
from twinfire.kernels.ops import (
    A,
    EmbeddingRef,
    HeadLayout,
    LinearRef,
    RopeRef,
    StepOps,
    VectorRef,
    WeightOps,
)
from twinfire.models.latent_attention import LatentAttention
from twinfire.models.rope import rope_table
from twinfire.models.tensor_names import check_shapes
from twinfire.protocol.errors import ModelError


class _Attention(Protocol):
    def __call__(self, ops: StepOps[A], x: A, layer: int) -> A: ...


@dataclass(frozen=True, slots=True)
class _LlamaAttention:
    heads: HeadLayout
    rope: RopeRef
    qkv: LinearRef
    output: LinearRef

    def __call__(self, ops: StepOps[A], x: A, layer: int) -> A:
        qkv = ops.rope(ops.linear(x, self.qkv), self.heads, self.rope)
        ops.write_kv(qkv, self.heads, layer)
        attended = ops.attention(qkv, self.heads, layer, None, self.heads.head_dim**-0.5)
        return ops.linear(attended, self.output)


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: VectorRef
    attention: _Attention
    feed_forward_norm: VectorRef
    gate_up: LinearRef
    down: LinearRef


class Eagle3Head:
    """A built head. `logits(ops, first(ops))` or `logits(ops, further(ops))` computes a draft."""

    def __init__(
        self,
        config: DraftHeadConfig,
        weights: WeightSource,
        ops: WeightOps,
        target_embedding: EmbeddingRef,
    ) -> None:
        """Take the weights in order of use.

        `target_embedding` is a reference of `ops` and is read where the head has no embedding of
        its own. ModelError naming what is missing, misshapen or not supported.
        """
        _check(config, weights, target_embedding.width)
        self._config = config
        self._eps = config.rms_norm_eps
        mla = config.mla

        def vector(name: str) -> VectorRef:
            return ops.vector(weights.tensor(f"{name}.weight"))

        def linear(*names: str) -> LinearRef:
            parts: list[MappedTensor] = [weights.tensor(f"{name}.weight") for name in names]
            return ops.linear(parts)

        def attention(prefix: str) -> _Attention:
            if mla is not None:
                return LatentAttention(config, mla, weights, ops, rope, prefix)
            return _LlamaAttention(
                HeadLayout(config.num_heads, config.num_kv_heads, config.head_dim),
                rope,
                qkv=linear(*(f"{prefix}.{part}_proj" for part in "qkv")),
                output=linear(f"{prefix}.o_proj"),
            )

        def layer(prefix: str) -> _Layer:
            feed_forward = f"{prefix}.mlp"
            return _Layer(
                input_norm=vector(f"{prefix}.input_layernorm"),
                attention=attention(f"{prefix}.self_attn"),
                feed_forward_norm=vector(f"{prefix}.post_attention_layernorm"),
                gate_up=linear(f"{feed_forward}.gate_proj", f"{feed_forward}.up_proj"),
                down=linear(f"{feed_forward}.down_proj"),
            )

        num_features = len(config.feature_layers)
        self._feature_norms = (
            tuple(vector(f"fc_norm.{index}") for index in range(num_features))
            if config.fc_norm
            else ()
        )
        self._features_norm = vector("input_norm") if config.norm_before_fc else None
        self._fc = linear("fc") if config.uses_features else None
        self._embedding = (
            ops.embedding(weights.tensor(EMBEDDING)) if EMBEDDING in weights else target_embedding
        )
        self._hidden_norm = vector("layers.0.hidden_norm")
        turned_width = config.head_dim if mla is None else mla.qk_rope_head_dim
        rope = ops.rope(rope_table(config.rope, turned_width))
        self._layers = tuple(layer(f"layers.{index}") for index in range(config.num_layers))
        self._final_norm = vector("norm")
        self._head = linear("lm_head")

    @property
    def width(self) -> int:
        """Elements of a row that it drafts from."""
        return self._config.hidden_size

    def first(self, ops: StepOps[A]) -> A:
        """Draft from the target's kept features; returns the normed state of the logit rows.

        Keeps, as feature 0, what `further` reads: one row per logit row.
        """
        return self._draft(ops, self.fused(ops))

    def fused(self, ops: StepOps[A]) -> A:
        """Return what `first` drafts from: the target's features as one of the head's own width."""
        if self._fc is None:
            return ops.kept_feature(0, self._config.hidden_size)
        width = self._config.target_hidden_size
        features = [
            ops.kept_feature(index, width) for index in range(len(self._config.feature_layers))
        ]
        if self._feature_norms:
            features = [
                ops.rms_norm(feature, norm, self._eps)
                for feature, norm in zip(features, self._feature_norms, strict=True)
            ]
        x = features[0] if len(features) == 1 else ops.concat(features)
        if self._features_norm is not None:
            x = ops.rms_norm(x, self._features_norm, self._eps)
        return ops.linear(x, self._fc)

    def further(self, ops: StepOps[A]) -> A:
        """Do the same from what the last draft kept."""
        return self._draft(ops, ops.kept_feature(0, self._config.hidden_size))

    def logits(self, ops: StepOps[A], hidden_rows: A) -> A:
        """Return the draft vocabulary's scores of some rows of what a draft returned."""
        return ops.linear(hidden_rows, self._head)

    def _draft(self, ops: StepOps[A], feature: A) -> A:
        embedded = ops.rms_norm(ops.embed(self._embedding), self._layers[0].input_norm, self._eps)
        normed = ops.rms_norm(feature, self._hidden_norm, self._eps)
        residual = normed if self._config.norm_before_residual else feature
        x = ops.concat([embedded, normed])
        for index, layer in enumerate(self._layers):
            if index:
                x, residual = ops.add_rms_norm(x, residual, layer.input_norm, self._eps)
            x = layer.attention(ops, x, index)
            x, residual = ops.add_rms_norm(x, residual, layer.feed_forward_norm, self._eps)
            x = ops.linear(ops.silu_mul(ops.linear(x, layer.gate_up)), layer.down)
        x, residual = ops.take_logit_rows(x), ops.take_logit_rows(residual)
        x, residual = ops.add_rms_norm(x, residual, self._final_norm, self._eps)
        ops.keep_feature(x if self._config.norm_output else residual, 0)
        return x


def _check(config: DraftHeadConfig, weights: WeightSource, target_embedding_width: int) -> None:
    if (config.attention == "mla") != (config.mla is not None):
        raise ModelError(
            f"the draft head's attention is {config.attention}, its mla sizes are {config.mla}"
        )
    if config.num_layers < 1:
        raise ModelError("the draft head's num_layers must be at least 1")
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"the draft head's num_heads {config.num_heads} is no multiple of its num_kv_heads "
            f"{config.num_kv_heads}"
        )
    if not config.uses_features and config.hidden_size != config.target_hidden_size:
        raise ModelError(
            f"the draft head's hidden_size {config.hidden_size} is not the target's "
            f"{config.target_hidden_size}, and it has no fc between them"
        )
    shapes = draft_head_shapes(config)
    if EMBEDDING in weights:
        shapes[EMBEDDING] = (config.vocab_size, config.hidden_size)
    check_shapes(shapes, weights, "the draft head")
    if EMBEDDING not in weights and target_embedding_width != config.hidden_size:
        raise ModelError(
            f"the draft head has no {EMBEDDING}, and its hidden_size {config.hidden_size} is not "
            f"the width {target_embedding_width} of the target's embedding"
        )
