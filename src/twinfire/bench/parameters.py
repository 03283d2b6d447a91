"""The parameters of each scenario, with the defaults of the project's own measurements.

Lengths are in tokens as the server counts them, templates included. Plain data, cheap to import:
`scenarios` turns it into requests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

Parameter: TypeAlias = bool | int | float | str | list[float] | None
"""A parameter's value as a result file holds it."""


@dataclass(frozen=True, slots=True)
class Concurrent:
    """Equal requests, `concurrency` at once. With concurrency 1 it is the scenario `single`."""

    name: str = "concurrent"
    num_requests: int = 32
    concurrency: int = 16
    input_tokens: int = 512
    output_tokens: int = 128


@dataclass(frozen=True, slots=True)
class InterferenceStreams:
    """`streams` decode streams while `long_requests` long prompts arrive every `interval_s`."""

    streams: int = 4
    input_tokens: int = 128
    output_tokens: int = 256
    long_requests: int = 5
    long_input_tokens: int = 3000
    long_output_tokens: int = 16
    interval_s: float = 2.0
    name: str = "interference"


@dataclass(frozen=True, slots=True)
class Agent:
    """Conversations of several turns, each session with its own affinity key."""

    sessions: int = 4
    turns: int = 5
    system_tokens: int = 1000
    turn_tokens: int = 200
    output_tokens: int = 100
    think_s: float = 0.0
    share_system_prompt: bool = False
    send_session: bool = True
    name: str = "agent"


@dataclass(frozen=True, slots=True)
class Prefix:
    """A long system prompt that every request shares, then a question of its own."""

    num_requests: int = 5
    concurrency: int = 1
    prefix_tokens: int = 3000
    input_tokens: int = 64
    output_tokens: int = 32
    name: str = "prefix"


@dataclass(frozen=True, slots=True)
class RateSweep:
    """Poisson arrivals at each of several rates, one after the other."""

    rates_per_s: tuple[float, ...] = (0.5, 1.0, 2.0)
    num_requests: int = 32
    """At each rate."""
    input_tokens: int = 512
    output_tokens: int = 128
    name: str = "rate"


@dataclass(frozen=True, slots=True)
class TraceReplay:
    """The requests of a real trace at their own times."""

    path: Path
    max_requests: int | None = 100
    time_scale: float = 1.0
    length_scale: float | None = None
    name: str = "trace"


Scenario: TypeAlias = Concurrent | InterferenceStreams | Agent | Prefix | RateSweep | TraceReplay


def with_parameters(scenario: Scenario, values: Mapping[str, object]) -> Scenario:
    """Return the scenario with some parameters replaced; lists become tuples.

    Values must have been checked; TypeError for names that the scenario lacks.
    """
    plain = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    return dataclasses.replace(scenario, **plain)  # type: ignore[arg-type]
