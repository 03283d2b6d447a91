"""The drafter that a worker was told to use, put together."""

from __future__ import annotations

from twinfire.engine.drafters.calibration import Calibration
from twinfire.engine.drafters.drafter import Drafter
from twinfire.engine.drafters.hybrid import HybridDrafter
from twinfire.engine.drafters.ngram import NgramDrafter
from twinfire.engine.drafters.prediction import PredictionDrafter
from twinfire.engine.drafters.suffix import SuffixDrafter
from twinfire.protocol.speculation import SpeculationOptions


def make_drafter(
    options: SpeculationOptions, calibration: Calibration, head: Drafter | None
) -> Drafter:
    """Return the drafter of `options`, which must not be off, behind a client's prediction.

    `head` is the draft head's. Where there is none hybrid drafts as suffix does.
    """
    return HybridDrafter(PredictionDrafter(), _method(options, calibration, head), calibration)


def _method(options: SpeculationOptions, calibration: Calibration, head: Drafter | None) -> Drafter:
    if options.method == "ngram":
        return NgramDrafter(options.min_match, options.max_match)
    if options.method == "eagle3" and head is not None:
        return head
    suffix = SuffixDrafter(options.min_match, options.tree_depth, options.tree_tokens)
    return HybridDrafter(suffix, head, calibration) if head is not None else suffix
