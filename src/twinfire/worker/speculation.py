"""From `--speculate` to a speculator: the draft head, the drafters, and what steps cost here."""

from __future__ import annotations

import logging
import time

import numpy as np

from twinfire.artifacts.checkpoint import Checkpoint
from twinfire.artifacts.draft_head import DraftHead, open_draft_head
from twinfire.artifacts.shipped_heads import find_shipped_head, resolve_draft_head
from twinfire.engine.drafters.draft_lengths import DraftLengths
from twinfire.engine.drafters.eagle3 import Eagle3Drafter
from twinfire.engine.drafters.head_worth import HeadWorth
from twinfire.engine.drafters.make_drafter import make_drafter
from twinfire.engine.drafters.step_costs import StepCosts
from twinfire.engine.runner import Runner
from twinfire.engine.spans import Span, pack_spans
from twinfire.engine.speculator import Speculator
from twinfire.kernels.sampling_ops import SamplingOps
from twinfire.protocol.errors import ModelError
from twinfire.protocol.speculation import SpeculationOptions

log = logging.getLogger(__name__)
_CALIBRATION_CONTEXT = 256
"""Tokens before those of a calibrating step."""
_CALIBRATION_ROWS = 64


def open_head(options: SpeculationOptions, checkpoint: Checkpoint) -> DraftHead | None:
    """Return the head that the options ask for, None where they ask for none.

    A hybrid that names no head goes without where none is shipped, which is logged. ModelError when
    there is no other that was asked for, or it does not fit, or the model has no output to draft.
    """
    if options.method != "off" and checkpoint.config.pooling is not None:
        raise ModelError(
            f"speculate {options.method}: {checkpoint.name} embeds texts and generates none"
        )
    if options.method == "hybrid" and options.head is None:
        path = find_shipped_head(checkpoint)
        if path is None:
            log.warning(
                "no draft head is shipped for %s; hybrid drafts as suffix does "
                "(twinfire draft train makes a head)",
                checkpoint.name,
            )
            return None
        return open_draft_head(path, checkpoint.config)
    return resolve_draft_head(options.head, checkpoint) if wants_head(options) else None


def wants_head(options: SpeculationOptions) -> bool:
    """Whether a draft head drafts, alone or beside others."""
    return options.method in ("eagle3", "hybrid")


def num_lookahead_tokens(options: SpeculationOptions) -> int:
    """Return the room that a head's chain takes behind the tokens of a step."""
    return _head_drafts(options) if wants_head(options) else 0


def build_speculator(
    options: SpeculationOptions, runner: Runner, sampling_ops: SamplingOps, num_blocks: int
) -> Speculator | None:
    """Measure what steps cost and return the speculator, None when speculation is off.

    `runner` has its KV memory, of which nothing is used yet.
    """
    if options.method == "off":
        return None
    costs = StepCosts()
    if options.adaptive:
        _calibrate(costs, runner, sampling_ops, num_blocks)
    lengths = DraftLengths(costs, options.max_drafts, is_adaptive=options.adaptive)
    head: Eagle3Drafter | None = None
    if runner.draft is not None:
        block_size = runner.kv_layout.block_size
        head = Eagle3Drafter(runner.draft, block_size, _head_drafts(options))
    return Speculator(
        make_drafter(options, lengths.calibration, head),
        options.max_drafts,
        lengths,
        costs,
        head,
        HeadWorth() if options.adaptive else None,
        vocab_size=runner.vocab_size,
    )


def _head_drafts(options: SpeculationOptions) -> int:
    return options.max_drafts if options.method == "eagle3" else options.head_drafts


def _calibrate(
    costs: StepCosts, runner: Runner, sampling_ops: SamplingOps, num_blocks: int
) -> None:
    """Time steps of one sequence, over blocks that nobody has written."""
    block_size = runner.kv_layout.block_size
    max_rows = min(_CALIBRATION_ROWS, num_blocks * block_size // 2)
    start = min(_CALIBRATION_CONTEXT, num_blocks * block_size - max_rows)
    blocks = range(-(-(start + max_rows) // block_size))

    def seconds(num_rows: int) -> float:
        span = Span(blocks, start, np.zeros(num_rows, np.int32).tolist())
        batch = pack_spans([span], block_size, range(num_rows))
        started_s = time.perf_counter()
        runner.execute(batch)
        sampling_ops.argmax(runner.logits(0, num_rows))
        return time.perf_counter() - started_s

    costs.calibrate(seconds, max_rows)
