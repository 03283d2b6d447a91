"""How many drafted tokens a target would accept, counted on text that it wrote."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(slots=True)
class AcceptanceCurve:
    """Counts by position in a chain of drafts."""

    num_chains: int = 0
    num_tried: list[int] = field(default_factory=list)
    """Chains whose draft i was judged, all before it having been right, for i = 1, 2 ..."""
    num_reached: list[int] = field(default_factory=list)
    """Chains whose first i drafts were all right, for i = 1, 2 ..."""

    def add(self, right: Tensor, known: Tensor | None = None) -> None:
        """Count chains: `right` [chains, passes] tells which drafts were right.

        `known` of the same shape tells where that can be judged; a chain counts until then.
        """
        judged = torch.ones_like(right) if known is None else known.cumprod(dim=1).bool()
        reached = (right & judged).to(torch.int64).cumprod(dim=1)
        before = torch.cat([torch.ones_like(reached[:, :1]), reached[:, :-1]], dim=1)
        self.num_chains += right.shape[0]
        self.num_tried = _sums(self.num_tried, before * judged)
        self.num_reached = _sums(self.num_reached, reached)

    def rates(self) -> list[float]:
        """Return the share of right drafts at each position, of those that were reached."""
        return [
            reached / tried if tried else 0.0
            for tried, reached in zip(self.num_tried, self.num_reached, strict=True)
        ]

    def length(self, num_drafts: int) -> float:
        """Return tokens per verification with `num_drafts` drafts, the target's own included."""
        return sum(accumulate(self.rates()[:num_drafts], _times, initial=1.0))


def _times(a: float, b: float) -> float:
    return a * b


def _sums(totals: list[int], flags: Tensor) -> list[int]:
    counts = flags.sum(dim=0).tolist()
    return [a + b for a, b in zip(totals or [0] * len(counts), counts, strict=True)]


def acceptance_table(curves: Mapping[str, AcceptanceCurve]) -> str:
    """Return the curves as lines of Markdown."""
    passes = max((len(curve.num_reached) for curve in curves.values()), default=0)
    head = " | ".join(f"draft {index + 1}" for index in range(passes))
    lines = [f"| text | chains | {head} | tokens per step |", "|---" * (passes + 3) + "|"]
    for name, curve in curves.items():
        rates = " | ".join(f"{rate:.3f}" for rate in curve.rates())
        lines.append(f"| {name} | {curve.num_chains} | {rates} | {curve.length(passes):.2f} |")
    return "\n".join(lines)
