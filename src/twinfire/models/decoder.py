"""The dense decoder that Llama, Mistral, Qwen2 and Qwen3 share; they differ in its settings only.

Pre-norm layers of grouped-query attention with rotary positions and a gated feed-forward. Owns the
order of the ops and the references to its weights; holds no tensor and never looks at a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twinfire.artifacts.model_config import ModelConfig
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
from twinfire.models.rope import rope_table
from twinfire.models.tensor_names import (
    EMBEDDING,
    FINAL_NORM,
    OUTPUT_HEAD,
    check_tensors,
    layer_prefix,
)


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Norms of single query and key heads."""

    query: VectorRef
    key: VectorRef


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer's weights and window."""

    input_norm: VectorRef
    qkv: LinearRef
    head_norms: HeadNorms | None
    output: LinearRef
    feed_forward_norm: VectorRef
    gate_up: LinearRef
    down: LinearRef
    window: int | None


class Decoder:
    """A built model. `logits(ops, hidden_rows(ops))` computes a step."""

    def __init__(self, config: ModelConfig, weights: WeightSource, ops: WeightOps) -> None:
        """Take the weights in order of use; ModelError naming what is missing or misshapen."""
        check_tensors(config, weights)
        self._eps = config.rms_norm_eps
        self._heads = HeadLayout(config.num_heads, config.num_kv_heads, config.head_dim)
        self._scale = config.head_dim**-0.5
        self._embedding: EmbeddingRef = ops.embedding(weights.tensor(EMBEDDING))
        self._rope: RopeRef = ops.rope(rope_table(config.rope, config.head_dim))
        self._layers = tuple(
            _take_layer(config, weights, ops, layer) for layer in range(config.num_layers)
        )
        self._final_norm = ops.vector(weights.tensor(FINAL_NORM))
        self._head = ops.linear([_head(config, weights)])

    @property
    def embedding(self) -> EmbeddingRef:
        """The table that token ids are looked up in."""
        return self._embedding

    def hidden_rows(
        self, ops: StepOps[A], feature_layers: Sequence[int] = (), *, keep_final: bool = False
    ) -> A:
        """Run the step; returns the normed hidden state of its logit rows.

        The residual stream after each of `feature_layers` layers is kept: 0 is the embedding, and
        the number of layers is the state before the final norm. With `keep_final` the normed state
        of all rows is kept after them.
        """
        features = list(feature_layers)
        residual = ops.embed(self._embedding)
        x = ops.rms_norm(residual, self._layers[0].input_norm, self._eps)
        for index, layer in enumerate(self._layers):
            if index:
                x, residual = ops.add_rms_norm(x, residual, layer.input_norm, self._eps)
            if index in features:
                ops.keep_feature(residual, features.index(index))
            x = self._attend(ops, x, index, layer)
            x, residual = ops.add_rms_norm(x, residual, layer.feed_forward_norm, self._eps)
            x = ops.linear(ops.silu_mul(ops.linear(x, layer.gate_up)), layer.down)
        if keep_final or len(self._layers) in features:
            # Wanted of all rows, so all are summed and normed.
            x, residual = ops.add_rms_norm(x, residual, self._final_norm, self._eps)
            if len(self._layers) in features:
                ops.keep_feature(residual, features.index(len(self._layers)))
            if keep_final:
                ops.keep_feature(x, len(features))
            return ops.take_logit_rows(x)
        x, residual = ops.take_logit_rows(x), ops.take_logit_rows(residual)
        x, _ = ops.add_rms_norm(x, residual, self._final_norm, self._eps)
        return x

    def logits(self, ops: StepOps[A], hidden_rows: A) -> A:
        """Return the vocabulary's scores of some rows of `hidden_rows`.

        Of an embedding model the rows themselves.
        """
        return ops.linear(hidden_rows, self._head)

    def _attend(self, ops: StepOps[A], x: A, index: int, layer: DecoderLayer) -> A:
        qkv = ops.linear(x, layer.qkv)
        if layer.head_norms is not None:
            norms = layer.head_norms
            qkv = ops.head_norm(qkv, self._heads, norms.query, norms.key, self._eps)
        qkv = ops.rope(qkv, self._heads, self._rope)
        ops.write_kv(qkv, self._heads, index)
        attended = ops.attention(qkv, self._heads, index, layer.window, self._scale)
        return ops.linear(attended, layer.output)


def _head(config: ModelConfig, weights: WeightSource) -> MappedTensor:
    """Return what the last matrix is; an embedding model's leaves the hidden state as it is."""
    if config.pooling is not None:
        identity = np.eye(config.hidden_size, dtype=np.float32)
        return MappedTensor("identity", identity.shape, "f32", identity)
    return weights.tensor(EMBEDDING if config.tie_word_embeddings else OUTPUT_HEAD)


def _take_layer(
    config: ModelConfig, weights: WeightSource, ops: WeightOps, layer: int
) -> DecoderLayer:
    prefix = layer_prefix(layer)

    def tensors(*names: str) -> list[MappedTensor]:
        return [weights.tensor(prefix + name) for name in names]

    def linear(biased: bool, *names: str) -> LinearRef:
        biases = tensors(*(f"{name}.bias" for name in names)) if biased else []
        return ops.linear(tensors(*(f"{name}.weight" for name in names)), biases)

    def vector(name: str) -> VectorRef:
        return ops.vector(weights.tensor(f"{prefix}{name}.weight"))

    return DecoderLayer(
        input_norm=vector("input_layernorm"),
        qkv=linear(config.qkv_bias, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        head_norms=(
            HeadNorms(vector("self_attn.q_norm"), vector("self_attn.k_norm"))
            if config.qk_norm
            else None
        ),
        output=linear(config.output_bias, "self_attn.o_proj"),
        feed_forward_norm=vector("post_attention_layernorm"),
        gate_up=linear(config.mlp_bias, "mlp.gate_proj", "mlp.up_proj"),
        down=linear(config.mlp_bias, "mlp.down_proj"),
        window=config.window_of(layer),
    )
