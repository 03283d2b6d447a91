"""What a draft head says along a text that is known: all chains of drafts at once."""

from __future__ import annotations

import torch
from torch import Tensor

from twinfire.training.draft_module import DraftModule, PassKeys


def chain_logits(
    module: DraftModule, embedding: Tensor, tokens: Tensor, features: Tensor, num_passes: int
) -> list[Tensor]:
    """Return each pass's scores over the draft vocabulary, [T, draft_vocab].

    `embedding` [vocab, hidden], `tokens` [T], `features` [T, features of the target side by side].
    Row t of pass i drafts token t + 2 + i where all tokens before it were drafted right; it is
    valid while t + 1 + i is a token. Computes in bfloat16.
    """
    seen: list[PassKeys] = []
    logits: list[Tensor] = []
    with torch.autocast("cpu", torch.bfloat16):
        feature = module.first_feature(features)
        for index in range(num_passes):
            shifted = torch.zeros_like(tokens)
            shifted[: len(tokens) - 1 - index] = tokens[1 + index :]
            feature, own = module(embedding[shifted], feature, seen)
            seen.append(own)
            logits.append(module.logits(feature))
            feature = module.next_feature(feature)
    return logits
