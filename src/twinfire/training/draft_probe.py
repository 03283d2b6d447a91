"""How many of a head's drafts its target accepts on given texts, and whether it reads the right
layers.

A text that the target wrote is what its drafts must match. On any other text they are compared
with the target's own greedy choice, along the text for as long as the two agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from twinfire.artifacts.checkpoint import Checkpoint
from twinfire.artifacts.draft_head import DraftHead
from twinfire.kernels.torch.dtypes import read_tensor
from twinfire.models.tensor_names import EMBEDDING, OUTPUT_HEAD
from twinfire.training.acceptance import AcceptanceCurve
from twinfire.training.draft_chains import chain_logits
from twinfire.training.draft_loader import draft_embedding, load_draft_module, target_token_ids
from twinfire.training.sample import Sample
from twinfire.training.target_states import TargetStates, TextStates

MAX_TEXT_TOKENS = 2048
_MARGIN = 0.05
"""Tokens per step by which other layers must be better; less is chance on a short text."""
_ROWS_AT_ONCE = 256

Layers = tuple[int, ...]


@dataclass(slots=True)
class ProbeReport:
    """What was counted."""

    num_drafts: int
    num_tokens: int = 0
    by_domain: dict[str, AcceptanceCurve] = field(default_factory=dict)
    by_layers: dict[Layers, AcceptanceCurve] = field(default_factory=dict)
    """Of the head's own layers, first, and of those one before and one after, on the same text."""

    def better_layers(self) -> Layers | None:
        """Return layers that the head reads clearly better, None where its own are best."""
        lengths = {
            layers: curve.length(self.num_drafts) for layers, curve in self.by_layers.items()
        }
        if not lengths:
            return None
        own = next(iter(lengths))
        best = max(lengths, key=lambda layers: lengths[layers])
        return best if lengths[best] > lengths[own] + _MARGIN else None


class DraftProbe:
    """A head beside its loaded target. ModelError for a head that is not computed."""

    def __init__(self, checkpoint: Checkpoint, head: DraftHead, num_drafts: int) -> None:
        config, weights = checkpoint.config, checkpoint.weights
        self._num_drafts = num_drafts
        self._module = load_draft_module(head)
        self._embedding = draft_embedding(head, weights)
        self._target_ids = target_token_ids(head)
        output = EMBEDDING if config.tie_word_embeddings else OUTPUT_HEAD
        self._output_head = read_tensor(weights.tensor(output), torch.bfloat16)
        self._width = config.hidden_size
        self._layer_sets = neighbours(head.config.feature_layers, config.num_layers)
        self._kept = tuple(sorted({layer for layers in self._layer_sets for layer in layers}))
        self._uses_features = head.config.uses_features
        # A target of which nothing is kept would have no features to join.
        kept = self._kept or (config.num_layers,)
        self._target = TargetStates(config, weights, kept, max_tokens=MAX_TEXT_TOKENS)

    @torch.inference_mode()
    def measure(
        self,
        samples: Iterable[Sample],
        *,
        written_by_target: bool,
        max_layer_tokens: int,
        progress: Callable[[int], None] = lambda _: None,
    ) -> ProbeReport:
        """Count over samples of at most MAX_TEXT_TOKENS; `progress` is told tokens done.

        Other layers are tried on the first samples, until they have `max_layer_tokens`.
        """
        report = ProbeReport(self._num_drafts)
        for sample in samples:
            (states,) = self._target.compute([sample.tokens])
            tokens = torch.tensor(sample.tokens)
            wanted = None if written_by_target else self._greedy(states.final)
            first = max(sample.answer_start - 2, 0)
            tries_others = report.num_tokens < max_layer_tokens
            for layers in self._layer_sets if tries_others else self._layer_sets[:1]:
                features = self._features(states, layers)
                right, known = self._judge(tokens, features, wanted)
                if layers == self._layer_sets[0]:
                    curve = report.by_domain.setdefault(sample.domain, AcceptanceCurve())
                    curve.add(right[first:], known[first:])
                if tries_others and len(self._layer_sets) > 1:
                    curve = report.by_layers.setdefault(layers, AcceptanceCurve())
                    curve.add(right[first:], known[first:])
            report.num_tokens += len(tokens)
            progress(report.num_tokens)
        return report

    def _features(self, states: TextStates, layers: Layers) -> Tensor:
        if not self._uses_features:
            return states.final.clone()
        chunks = dict(
            zip(self._kept, torch.split(states.features, self._width, dim=1), strict=True)
        )
        return torch.cat([chunks[layer] for layer in layers], dim=1)

    def _greedy(self, final: Tensor) -> Tensor:
        """Return the target's most likely next token after each row, [T]."""
        rows = torch.split(final, _ROWS_AT_ONCE)
        return torch.cat([F.linear(chunk, self._output_head).argmax(-1) for chunk in rows])

    def _judge(
        self, tokens: Tensor, features: Tensor, greedy: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return which drafts are right and where that is known, each [chains, drafts]."""
        num_drafts = self._num_drafts
        num_rows = max(len(tokens) - 1 - num_drafts, 0)
        right: list[Tensor] = []
        known: list[Tensor] = []
        follows = torch.ones(num_rows, dtype=torch.bool)
        passes = chain_logits(self._module, self._embedding, tokens, features, num_drafts)
        for index, logits in enumerate(passes):
            drafted = self._target_ids[logits[:num_rows].argmax(-1)]
            written = tokens[2 + index : 2 + index + num_rows]
            known.append(follows)
            if greedy is None:
                right.append(drafted == written)
            else:
                chosen = greedy[1 + index : 1 + index + num_rows]
                right.append(drafted == chosen)
                # Where the text goes on otherwise, the next draft is not what would be drafted.
                follows = follows & (chosen == written)
        return torch.stack(right, dim=1), torch.stack(known, dim=1)


def neighbours(layers: Layers, num_layers: int) -> list[Layers]:
    """Return `layers`, then those one before and one after, as far as the target has them."""
    if not layers:
        return [layers]
    shifted = [tuple(layer + shift for layer in layers) for shift in (-1, 1)]
    return [layers, *(s for s in shifted if s[0] >= 0 and s[-1] <= num_layers)]


def text_samples(tokens: Sequence[int], num_drafts: int, domain: str = "text") -> list[Sample]:
    """Return a text in pieces that can be probed; too short a rest is left out."""
    pieces = [
        list(tokens[start : start + MAX_TEXT_TOKENS])
        for start in range(0, len(tokens), MAX_TEXT_TOKENS)
    ]
    return [Sample(piece, 1, domain) for piece in pieces if len(piece) > num_drafts + 2]
