"""A trace fitted to a number of workers, so that both pools are loaded alike."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from simulated_cache import BLOCK_TOKENS, UNIT_BLOCKS, UNIT_TOKENS
from simulated_worker import Speeds
from twinfire.bench.trace import TraceRequest

LOAD = 0.7
STREAMS = 24
"""Streams of the trace's mean size that a decode worker has at that load."""
SESSION_UNITS = 2
"""Full units of a prompt that can start a session."""


@dataclass(frozen=True, slots=True)
class Shape:
    num_prefill: int
    num_decode: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        prefill, _, decode = text.partition("x")
        return cls(int(prefill), int(decode))

    def __str__(self) -> str:
        return f"{self.num_prefill}P + {self.num_decode}D"


@dataclass(frozen=True, slots=True)
class Plan:
    """A trace fitted to a shape, so that both pools are loaded to LOAD."""

    requests: Sequence[TraceRequest]
    time_scale: float
    speeds: Speeds
    num_blocks: int
    """KV blocks of each worker."""
    endless_share: float
    """Of prompt tokens, those that a cache without limits would hold."""
    pooled_share: float
    """The same of one cache with the memory of all prefill workers."""


def fit(requests: Sequence[TraceRequest], shape: Shape) -> Plan:
    """Choose memory, arrival times and prefill speed, in this order."""
    total = sum(request.input_tokens for request in requests)
    num_steps = sum(request.output_tokens for request in requests)
    block_steps = sum(
        request.output_tokens * (request.input_tokens + request.output_tokens / 2) / BLOCK_TOKENS
        for request in requests
    )
    largest = max(request.input_tokens + request.output_tokens for request in requests)
    num_used = max(STREAMS * block_steps / num_steps, LOAD * 1.25 * largest / BLOCK_TOKENS)
    step_s = Speeds.step_base_s + Speeds.step_s_per_block * num_used
    # Little's law: blocks in use are block-steps begun in a second times the step's length.
    seconds = block_steps * step_s / (shape.num_decode * num_used)
    num_blocks = math.ceil(num_used / LOAD)
    pooled = cached_tokens(requests, shape.num_prefill * num_blocks // UNIT_BLOCKS)
    rate = (total - pooled) / (seconds * shape.num_prefill * LOAD)
    return Plan(
        requests,
        time_scale=seconds / (requests[-1].arrival_s - requests[0].arrival_s),
        speeds=Speeds(prefill_tokens_per_s=rate),
        num_blocks=num_blocks,
        endless_share=cached_tokens(requests, 1 << 60) / total,
        pooled_share=pooled / total,
    )


def cached_tokens(requests: Sequence[TraceRequest], num_units: int) -> int:
    """Prompt tokens found by one LRU cache of so many units that serves all in order."""
    cache: OrderedDict[int, None] = OrderedDict()
    found = 0
    for request in requests:
        units = cacheable_units(request)
        found += next((i for i, unit in enumerate(units) if unit not in cache), len(units))
        for unit in reversed(units):
            cache[unit] = None
            cache.move_to_end(unit)
        while len(cache) > num_units:
            cache.popitem(last=False)
    return found * UNIT_TOKENS


def cacheable_units(request: TraceRequest) -> tuple[int, ...]:
    """Full units; the last name of a trace's prompt is of a partly filled one."""
    return request.block_ids[: (request.input_tokens - 1) // UNIT_TOKENS]


def sessions_of(requests: Sequence[TraceRequest]) -> list[str | None]:
    """A session name for each request that goes on where an earlier prompt ended."""
    ends: dict[int, str] = {}
    names: list[str | None] = []
    for number, request in enumerate(requests):
        units = cacheable_units(request)
        known = (ends[unit] for unit in reversed(units) if unit in ends)
        name = next(known, f"session {number}") if len(units) >= SESSION_UNITS else None
        if name is not None:
            ends[units[-1]] = name
        names.append(name)
    return names
