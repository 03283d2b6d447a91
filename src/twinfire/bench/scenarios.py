"""From a scenario's parameters to a workload with finished prompts.

Owns the check that a request fits the model's window; sends nothing that is measured.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from twinfire.bench.parameters import (
    Agent,
    Concurrent,
    InterferenceStreams,
    Prefix,
    RateSweep,
    Scenario,
    TraceReplay,
)
from twinfire.bench.prompt_builder import PromptBuilder
from twinfire.bench.request import GenerationRequest, Message, user_request
from twinfire.bench.trace import TRACE_BLOCK_TOKENS, TraceRequest, read_trace, scale_trace
from twinfire.bench.workloads import (
    Agents,
    AgentSession,
    ClosedLoop,
    Interference,
    OpenLoop,
    Sequential,
    Workload,
)
from twinfire.protocol.errors import TwinfireError


class ScenarioError(TwinfireError):
    """Parameters that cannot be run; the message names the option and the limit."""


@dataclass(frozen=True, slots=True)
class Built:
    """A workload, and what a reader of its results must know."""

    workload: Workload
    prompt_tokens: Mapping[str, int] = field(default_factory=dict)
    """By phase, the length of its prompts where it is one."""
    notes: tuple[str, ...] = ()


_PROMPTS_PER_STREAM = 8


async def build_scenario(
    scenario: Scenario, builder: PromptBuilder, max_model_len: int | None
) -> Built:
    """Make the prompts; ScenarioError when a request cannot fit the window (None: not known)."""
    match scenario:
        case Concurrent():
            return await _concurrent(scenario, builder, max_model_len)
        case InterferenceStreams():
            return await _interference(scenario, builder, max_model_len)
        case Agent():
            return await _agent(scenario, builder, max_model_len)
        case Prefix():
            return await _prefix(scenario, builder, max_model_len)
        case RateSweep():
            return await _rate_sweep(scenario, builder, max_model_len)
        case TraceReplay():
            return await _trace(scenario, builder, max_model_len)


async def _concurrent(
    scenario: Concurrent, builder: PromptBuilder, max_model_len: int | None
) -> Built:
    check_fits(scenario.input_tokens, scenario.output_tokens, max_model_len)
    requests = [
        user_request(await builder.prompt(scenario.input_tokens), scenario.output_tokens)
        for _ in range(scenario.num_requests)
    ]
    workload = ClosedLoop(scenario.name, requests, scenario.concurrency)
    return Built(workload, {scenario.name: scenario.input_tokens})


async def _interference(
    scenario: InterferenceStreams, builder: PromptBuilder, max_model_len: int | None
) -> Built:
    check_fits(scenario.input_tokens, scenario.output_tokens, max_model_len)
    check_fits(scenario.long_input_tokens, scenario.long_output_tokens, max_model_len, "--long-")
    streams = [
        [
            user_request(
                await builder.prompt(scenario.input_tokens), scenario.output_tokens, label="decode"
            )
            for _ in range(_PROMPTS_PER_STREAM)
        ]
        for _ in range(scenario.streams)
    ]
    long_requests = [
        user_request(
            await builder.prompt(scenario.long_input_tokens),
            scenario.long_output_tokens,
            label="long",
        )
        for _ in range(scenario.long_requests)
    ]
    note = "ITL of the decode streams counts only while long prompts arrive and are answered"
    return Built(
        Interference(streams, long_requests, scenario.interval_s),
        {"decode": scenario.input_tokens, "long": scenario.long_input_tokens},
        (note,),
    )


async def _agent(scenario: Agent, builder: PromptBuilder, max_model_len: int | None) -> Built:
    total_input = (
        scenario.system_tokens
        + scenario.turns * (scenario.turn_tokens + builder.counter.overhead)
        + (scenario.turns - 1) * scenario.output_tokens
    )
    check_fits(total_input, scenario.output_tokens, max_model_len, "all turns' ")
    shared = await builder.text(scenario.system_tokens) if scenario.share_system_prompt else None
    key = builder.fork("session keys").block(8)
    sessions = []
    for index in range(scenario.sessions):
        system = await builder.text(scenario.system_tokens) if shared is None else shared
        turns = [await builder.text(scenario.turn_tokens) for _ in range(scenario.turns)]
        session = f"bench-{random.Random(key).getrandbits(32):08x}-{index}"
        sessions.append(
            AgentSession(
                session if scenario.send_session else "", system, turns, scenario.output_tokens
            )
        )
    return Built(Agents(sessions, scenario.think_s))


async def _prefix(scenario: Prefix, builder: PromptBuilder, max_model_len: int | None) -> Built:
    overhead = 2 * builder.counter.overhead
    check_fits(
        scenario.prefix_tokens + scenario.input_tokens + overhead,
        scenario.output_tokens,
        max_model_len,
    )
    system = Message("system", await builder.text(scenario.prefix_tokens))
    requests = [
        GenerationRequest(
            messages=(system, Message("user", await builder.text(scenario.input_tokens))),
            max_tokens=scenario.output_tokens,
            ignore_eos=True,
            temperature=0.0,
        )
        for _ in range(scenario.num_requests)
    ]
    first = ClosedLoop("first", requests[:1], 1)
    later = ClosedLoop("later", requests[1:], scenario.concurrency)
    return Built(Sequential([first, later]))


async def _rate_sweep(
    scenario: RateSweep, builder: PromptBuilder, max_model_len: int | None
) -> Built:
    check_fits(scenario.input_tokens, scenario.output_tokens, max_model_len)
    parts = []
    for rate in scenario.rates_per_s:
        draws = random.Random(builder.fork(f"arrivals at {rate}").block(16))
        at_s = 0.0
        arrivals = []
        for _ in range(scenario.num_requests):
            prompt = await builder.prompt(scenario.input_tokens)
            arrivals.append((at_s, user_request(prompt, scenario.output_tokens)))
            at_s += draws.expovariate(rate)
        parts.append(OpenLoop(f"{rate:g} req/s", arrivals))
    return Built(Sequential(parts), {part.name: scenario.input_tokens for part in parts})


async def _trace(scenario: TraceReplay, builder: PromptBuilder, max_model_len: int | None) -> Built:
    if max_model_len is None:
        raise ScenarioError(
            "the server does not say its window: give --max-model-len, to clip the trace to"
        )
    requests, scaling = scale_trace(
        read_trace(scenario.path),
        max_model_len=max_model_len,
        length_scale=scenario.length_scale,
        time_scale=scenario.time_scale,
        max_requests=scenario.max_requests,
    )
    block_tokens = max(round(TRACE_BLOCK_TOKENS * scaling.length_scale), 1)
    arrivals = []
    for request in requests:
        start = shared_start(builder, request, block_tokens)
        prompt = await builder.prompt(request.input_tokens, start)
        arrivals.append((request.arrival_s, user_request(prompt, request.output_tokens)))
    return Built(OpenLoop("trace", arrivals), notes=(scaling.sentence(),))


def shared_start(builder: PromptBuilder, request: TraceRequest, block_tokens: int) -> str:
    """Return the text of the request's blocks; a block's text depends only on its id.

    The prompt is cut where its length is reached, so that the last, partial block needs no care.
    """
    num_blocks = -(-request.input_tokens // block_tokens)
    blocks = (
        builder.fork(f"block {block_id}").block(block_tokens)
        for block_id in request.block_ids[:num_blocks]
    )
    return " ".join(blocks)


def check_fits(
    input_tokens: int, output_tokens: int, max_model_len: int | None, which: str = "--"
) -> None:
    """Raise ScenarioError when a request exceeds the window (None: the window is not known)."""
    if max_model_len is not None and input_tokens + output_tokens > max_model_len:
        raise ScenarioError(
            f"{which}input-tokens {input_tokens} and {which}output-tokens {output_tokens} together "
            f"exceed the model's window of {max_model_len} tokens"
        )
