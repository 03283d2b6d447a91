"""An EAGLE-3 draft head in torch, as it is trained (arXiv:2503.01840).

One decoder layer that reads the next token's embedding and a feature of the target, and predicts
the token after it over a draft vocabulary. Training-time test: later passes read the head's own
features in place of the target's; such a pass sees the first pass's keys up to its own row and,
of the later passes, its own row only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class DraftShape:
    """Sizes of a head. Widths in elements."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    draft_vocab_size: int
    rms_norm_eps: float
    num_features: int = 3
    """Layers of the target that are read."""
    target_hidden_size: int | None = None
    """Of one feature; None: `hidden_size`."""
    num_layers: int = 1
    """Layers after the first read the layer before them alone."""
    norm_before_residual: bool = False
    """Attention is added to the normed feature instead of the feature."""
    norm_before_fc: bool = False
    """One norm over all features side by side."""
    fc_norm: bool = False
    """A norm over each feature."""
    norm_output: bool = False
    """The next pass reads the feature after the final norm."""
    uses_features: bool = True
    """False: the target's final state is read as it is, without `fc`."""


class DraftModule(nn.Module):
    """The trainable head; parameters carry the published names."""

    def __init__(self, shape: DraftShape, inv_freq: Tensor, attention_factor: float = 1.0) -> None:
        """`inv_freq` [head_dim / 2] are rotary frequencies in radians per token.

        `attention_factor` multiplies their cosines and sines (yarn, arXiv:2309.00071).
        """
        super().__init__()
        self.shape = shape
        self._attention_factor = attention_factor
        width, eps = shape.hidden_size, shape.rms_norm_eps
        feature_width = shape.target_hidden_size or width
        all_width = shape.num_features * feature_width
        self.fc = nn.Linear(all_width, width, bias=False) if shape.uses_features else None
        self.input_norm = _Norm(all_width, eps) if shape.norm_before_fc else None
        norms = range(shape.num_features) if shape.fc_norm else ()
        self.fc_norm = nn.ModuleList(_Norm(feature_width, eps) for _ in norms)
        self.midlayer = _DraftLayer(shape)
        later = {str(index): _LaterLayer(shape) for index in range(1, shape.num_layers)}
        self.layers = nn.ModuleDict(later)
        self.norm = _Norm(width, shape.rms_norm_eps)
        self.lm_head = nn.Linear(width, shape.draft_vocab_size, bias=False)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def first_feature(self, target_features: Tensor) -> Tensor:
        """Return g [S, width] of the target's features [S, num_features * target width]."""
        if self.fc is None:
            return target_features
        if self.fc_norm:
            chunks = target_features.chunk(len(self.fc_norm), dim=-1)
            normed = [norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)]
            target_features = torch.cat(normed, dim=-1)
        if self.input_norm is not None:
            target_features = self.input_norm(target_features)
        feature: Tensor = self.fc(target_features)
        return feature

    def forward(
        self, embeddings: Tensor, feature: Tensor, seen: Sequence[PassKeys]
    ) -> tuple[Tensor, PassKeys]:
        """Return the feature after the last layer [S, width] and this pass's keys and values.

        Row t holds the embedding of token t + 1 + i, i being the pass, and the feature before it.
        `seen` are the passes before this one, the first of them over the target's features.
        """
        rows = torch.arange(len(feature), device=feature.device)
        angles = (rows + len(seen))[:, None].float() * self.get_buffer("inv_freq")[None, :]
        turns = angles.cos() * self._attention_factor, angles.sin() * self._attention_factor
        feature, own = self.midlayer(embeddings, feature, turns, [keys[0] for keys in seen])
        keys_of_layers: list[KeyValue] = [own]
        for index, layer in enumerate(self.layers.values(), start=1):
            feature, own = layer(feature, turns, [keys[index] for keys in seen])
            keys_of_layers.append(own)
        return feature, tuple(keys_of_layers)

    def next_feature(self, feature: Tensor) -> Tensor:
        """Return what the next pass reads of the feature [S, width] that a pass returned."""
        return self.norm(feature) if self.shape.norm_output else feature

    def logits(self, feature: Tensor) -> Tensor:
        """Return scores over the draft vocabulary [S, draft_vocab]."""
        scores: Tensor = self.lm_head(self.norm(feature))
        return scores


KeyValue = tuple[Tensor, Tensor]
"""Keys and values of one pass in one layer, each [kv heads, S, head_dim]."""
PassKeys = tuple[KeyValue, ...]
"""Of one pass in every layer."""
Turns = tuple[Tensor, Tensor]
"""Cosines and sines of each row's angles, each [S, head_dim / 2]."""


class _Norm(nn.Module):
    """RMSNorm in float32, whatever it is given (arXiv:1910.07467)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self._eps)


class _Attention(nn.Module):
    def __init__(self, shape: DraftShape, input_width: int) -> None:
        super().__init__()
        self._shape = shape
        head = shape.head_dim
        self.q_proj = nn.Linear(input_width, shape.num_heads * head, bias=False)
        self.k_proj = nn.Linear(input_width, shape.num_kv_heads * head, bias=False)
        self.v_proj = nn.Linear(input_width, shape.num_kv_heads * head, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * head, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, turns: Turns, seen: Sequence[KeyValue]) -> tuple[Tensor, KeyValue]:
        num_heads, num_kv = self._shape.num_heads, self._shape.num_kv_heads
        query = _turn(_heads(self.q_proj(x), num_heads), turns)
        key = _turn(_heads(self.k_proj(x), num_kv), turns)
        value = _heads(self.v_proj(x), num_kv)
        own = (key, value)
        group = num_heads // num_kv
        (first_key, first_value), *later = (*seen, own)
        scale = self._shape.head_dim**-0.5
        if not later:
            attended = F.scaled_dot_product_attention(
                query[None],
                first_key.repeat_interleave(group, 0)[None],
                first_value.repeat_interleave(group, 0)[None],
                is_causal=True,
                scale=scale,
            )[0]
        else:
            attended = _attend_first_and_own(query, first_key, first_value, later, group, scale)
        num_rows = x.shape[0]
        return self.o_proj(attended.transpose(0, 1).reshape(num_rows, -1)), own


def _attend_first_and_own(
    query: Tensor,
    first_key: Tensor,
    first_value: Tensor,
    later: Sequence[KeyValue],
    group: int,
    scale: float,
) -> Tensor:
    """Attend over the first pass's rows up to each row, and each row's own later passes."""
    keys, values = first_key.repeat_interleave(group, 0), first_value.repeat_interleave(group, 0)
    num_rows = query.shape[1]
    hidden = torch.ones(num_rows, num_rows, dtype=torch.bool, device=query.device).triu(1)
    over_first = (query @ keys.transpose(1, 2) * scale).float().masked_fill(hidden, -torch.inf)
    later_keys = [key.repeat_interleave(group, 0) for key, _ in later]
    over_own = torch.stack([(query * key).sum(-1) * scale for key in later_keys], dim=-1).float()
    weights = torch.cat([over_first, over_own], dim=-1).softmax(-1).to(query.dtype)
    attended = weights[..., :num_rows] @ values
    for index, (_, value) in enumerate(later):
        own_weight = weights[..., num_rows + index, None]
        attended = attended + own_weight * value.repeat_interleave(group, 0)
    return attended


class _FeedForward(nn.Module):
    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        width, inner = shape.hidden_size, shape.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class _DraftLayer(nn.Module):
    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        width, eps = shape.hidden_size, shape.rms_norm_eps
        self.self_attn = _Attention(shape, 2 * width)
        self.mlp = _FeedForward(shape)
        self.input_layernorm = _Norm(width, eps)
        self.hidden_norm = _Norm(width, eps)
        self.post_attention_layernorm = _Norm(width, eps)
        self._norm_before_residual = shape.norm_before_residual

    def forward(
        self, embeddings: Tensor, feature: Tensor, turns: Turns, seen: Sequence[KeyValue]
    ) -> tuple[Tensor, KeyValue]:
        normed = self.hidden_norm(feature)
        x = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        attended, own = self.self_attn(x, turns, seen)
        feature = (normed if self._norm_before_residual else feature) + attended
        return feature + self.mlp(self.post_attention_layernorm(feature)), own


class _LaterLayer(nn.Module):
    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        width, eps = shape.hidden_size, shape.rms_norm_eps
        self.self_attn = _Attention(shape, width)
        self.mlp = _FeedForward(shape)
        self.input_layernorm = _Norm(width, eps)
        self.post_attention_layernorm = _Norm(width, eps)

    def forward(
        self, feature: Tensor, turns: Turns, seen: Sequence[KeyValue]
    ) -> tuple[Tensor, KeyValue]:
        attended, own = self.self_attn(self.input_layernorm(feature), turns, seen)
        feature = feature + attended
        return feature + self.mlp(self.post_attention_layernorm(feature)), own


def _heads(x: Tensor, count: int) -> Tensor:
    """Return [S, count * d] as [count, S, d]."""
    return x.view(x.shape[0], count, -1).transpose(0, 1)


def _turn(heads: Tensor, turns: Turns) -> Tensor:
    """Rotate [heads, S, d] by `turns`; element i pairs with i + d / 2."""
    first, second = heads.float().chunk(2, dim=-1)
    cos, sin = turns
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(heads.dtype)
