"""Counts of what happened to requests between the workers, for the metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

FailureKind = Literal["worker_lost", "refused", "busy", "hand_off", "deadline", "invalid"]
"""Why a try ended without success; a closed set."""


@dataclass(slots=True)
class FlowTallies:
    """Sums over the life of a backend."""

    num_attempts: int = 0
    failures: Counter[FailureKind] = field(default_factory=Counter)
    num_resumes: int = 0
    """Choices that went on elsewhere after their worker was lost."""
    num_hand_overs: int = 0
    """Choices that were handed over anew after a preemption."""
    num_preemptions: int = 0
    num_hand_offs: int = 0
    """Prompts that a decode worker accepted from another worker."""
    moved_blocks: int = 0
    moved_bytes: int = 0
    transfer_s: float = 0.0
    """What moving added to requests, in all."""
    pulled_tokens: int = 0
