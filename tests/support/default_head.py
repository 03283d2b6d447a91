"""A head of the default model's sizes with random weights, for where none is shipped."""

from __future__ import annotations

import numpy as np

from support.tiny_models import ArrayWeights
from twinfire.artifacts.checkpoint import Checkpoint
from twinfire.artifacts.draft_head import DraftHead
from twinfire.artifacts.draft_head_config import DraftHeadConfig
from twinfire.artifacts.draft_head_shapes import draft_head_shapes

DRAFT_VOCAB = 1024


def random_default_head(target: Checkpoint) -> DraftHead:
    config = target.config
    head = DraftHeadConfig(
        hidden_size=config.hidden_size,
        target_hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_layers=1,
        draft_vocab_size=DRAFT_VOCAB,
        vocab_size=config.vocab_size,
        rms_norm_eps=config.rms_norm_eps,
        rope=config.rope,
        feature_layers=(2, config.num_layers // 2, config.num_layers - 3),
    )
    random = np.random.default_rng(0)
    arrays = {
        name: np.ones(shape, np.float32)
        if len(shape) == 1
        else random.standard_normal(shape, np.float32) * np.float32(0.05)
        for name, shape in draft_head_shapes(head).items()
    }
    draft_ids = np.sort(random.choice(config.vocab_size, DRAFT_VOCAB, replace=False))
    return DraftHead(head, ArrayWeights(arrays), draft_ids.astype(np.int64), "random")
