"""What routing has done, counted for metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from twinfire.gateway.routing.route import RouteReason


@dataclass(slots=True)
class RoutingTallies:
    """Counters from the router's start."""

    reasons: Counter[RouteReason] = field(default_factory=Counter)
    num_busy: int = 0
    """Times that nobody could take a request."""
    num_pull_hints: int = 0
    predicted_cached_tokens: int = 0
    """What the index promised of prompts whose truth is known."""
    true_cached_tokens: int = 0
    overestimated_tokens: int = 0
    underestimated_tokens: int = 0

    def compare(self, predicted: int, truth: int) -> None:
        """Count one prompt."""
        self.predicted_cached_tokens += predicted
        self.true_cached_tokens += truth
        self.overestimated_tokens += max(predicted - truth, 0)
        self.underestimated_tokens += max(truth - predicted, 0)
