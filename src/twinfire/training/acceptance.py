"""How many drafted tokens a target would accept, counted on text that it wrote."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class AcceptanceCurve:
    """Counts by position in a chain of drafts."""

    num_chains: int = 0
    num_reached: list[int] = field(default_factory=list)
    """Chains whose first i drafts were all right, for i = 1, 2 ..."""

    def add(self, right: Tensor) -> None:
        """Count chains: `right` [chains, passes] tells which drafts were right."""
        reached = right.to(torch.int64).cumprod(dim=1).sum(dim=0).tolist()
        self.num_chains += right.shape[0]
        if not self.num_reached:
            self.num_reached = [0] * len(reached)
        self.num_reached = [a + b for a, b in zip(self.num_reached, reached, strict=True)]

    def rates(self) -> list[float]:
        """Return the share of right drafts at each position, of those that were reached."""
        before = [self.num_chains, *self.num_reached]
        return [
            reached / tried if tried else 0.0
            for tried, reached in zip(before, self.num_reached, strict=False)
        ]

    def length(self, num_drafts: int) -> float:
        """Return tokens per verification with `num_drafts` drafts, the target's own included."""
        if not self.num_chains:
            return 1.0
        return 1.0 + sum(self.num_reached[:num_drafts]) / self.num_chains


def acceptance_table(curves: Mapping[str, AcceptanceCurve]) -> str:
    """Return the curves as lines of Markdown."""
    passes = max((len(curve.num_reached) for curve in curves.values()), default=0)
    head = " | ".join(f"draft {index + 1}" for index in range(passes))
    lines = [f"| text | chains | {head} | tokens per step |", "|---" * (passes + 3) + "|"]
    for name, curve in curves.items():
        rates = " | ".join(f"{rate:.3f}" for rate in curve.rates())
        lines.append(f"| {name} | {curve.num_chains} | {rates} | {curve.length(passes):.2f} |")
    return "\n".join(lines)
