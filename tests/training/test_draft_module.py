"""The head's parallel passes against drafting one token at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from twinfire.training.draft_module import DraftModule, DraftShape, PassKeys

SHAPE = DraftShape(
    hidden_size=24,
    intermediate_size=40,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    draft_vocab_size=30,
    rms_norm_eps=1e-5,
)
NUM_PASSES = 4
LENGTH = 12


def module() -> DraftModule:
    torch.manual_seed(0)
    return DraftModule(SHAPE, 10000.0 ** -(torch.arange(0, 8, 2) / 8))


def drafted_alone(head: DraftModule, embeddings: Tensor, features: Tensor, row: int) -> Tensor:
    """Return the logits of a chain of drafts after `row`, as a server computes them.

    One sequence of keys: true features up to `row`, then the head's own, each at the next position.
    """
    layer = head.midlayer
    num_heads, num_kv, width = SHAPE.num_heads, SHAPE.num_kv_heads, SHAPE.head_dim
    keys: list[Tensor] = []
    values: list[Tensor] = []
    logits: list[Tensor] = []
    fed = head.first_feature(features)
    feature = fed[0]
    for position in range(row + NUM_PASSES):
        if position <= row:
            feature = fed[position]
        x = torch.cat([layer.input_layernorm(embeddings[position + 1]), layer.hidden_norm(feature)])
        angle = position * head.get_buffer("inv_freq")

        def turned(vector: Tensor, count: int, angle: Tensor = angle) -> Tensor:
            first, second = vector.view(count, width).chunk(2, dim=-1)
            return torch.cat(
                [
                    first * angle.cos() - second * angle.sin(),
                    second * angle.cos() + first * angle.sin(),
                ],
                dim=-1,
            )

        attention = layer.self_attn
        query = turned(attention.q_proj(x), num_heads)
        keys.append(turned(attention.k_proj(x), num_kv))
        values.append(attention.v_proj(x).view(num_kv, width))
        heads = []
        for head_index in range(num_heads):
            kv = head_index // (num_heads // num_kv)
            scores = torch.stack([key[kv] @ query[head_index] for key in keys]) / width**0.5
            heads.append(scores.softmax(0) @ torch.stack([value[kv] for value in values]))
        result = feature + attention.o_proj(torch.cat(heads))
        result = result + layer.mlp(layer.post_attention_layernorm(result))
        if position >= row:
            logits.append(head.logits(result))
            feature = result
    return torch.stack(logits)


def test_training_passes_are_what_a_server_drafts() -> None:
    head = module()
    embeddings, features = torch.randn(LENGTH + NUM_PASSES, 24), torch.randn(LENGTH, 72)
    seen: list[PassKeys] = []
    passes: list[Tensor] = []
    with torch.no_grad():
        feature = head.first_feature(features)
        for index in range(NUM_PASSES):
            feature, own = head(embeddings[1 + index : 1 + index + LENGTH], feature, seen)
            seen.append(own)
            passes.append(head.logits(feature))
        for row in (0, 1, 5, LENGTH - 1):
            expected = drafted_alone(head, embeddings, features, row)
            got = torch.stack([logits[row] for logits in passes])
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_rows_do_not_see_what_comes_after_them() -> None:
    head = module()
    embeddings, features = torch.randn(LENGTH, 24), torch.randn(LENGTH, 72)
    changed = features.clone()
    changed[8:] += 1.0
    with torch.no_grad():
        first, _ = head(embeddings, head.first_feature(features), [])
        second, _ = head(embeddings, head.first_feature(changed), [])
    torch.testing.assert_close(first[:8], second[:8])
    assert not torch.allclose(first[8:], second[8:])
