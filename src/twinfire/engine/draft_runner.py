"""What speculation asks of an EAGLE-3 head that runs beside its target (arXiv:2503.01840).

The head has KV of its own, one more group in the target's blocks. Siblings implement it, as they do
`Runner`; a runner without a head has None in place of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from twinfire.kernels.step_batch import Int32Array, StepBatch

DRAFT_GROUP = "draft"
"""The KV group of a draft head."""
DRAFT_SCALES_GROUP = "draft_scales"
"""The scales of an 8-bit draft group: one float for each token and head."""


Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class DraftedTokens:
    """The head's first choice for each of R logit rows."""

    token_ids: npt.NDArray[np.int64]
    """[R] ids of the target's vocabulary."""
    probabilities: Float32Array
    """[R] the choice's share of the softmax over the draft vocabulary."""


def check_fused(fused: Float32Array, num_tokens: int, width: int) -> None:
    """Raise ValueError unless `fused` has one row of the head's width for each token."""
    if fused.shape != (num_tokens, width):
        raise ValueError(f"fused rows are {fused.shape}; the step takes {(num_tokens, width)}")


class DraftRunner(Protocol):
    """A loaded head. Belongs to its runner's step loop; needs the runner's `init_kv`."""

    @property
    def fused_width(self) -> int:
        """Elements of a row of `fused_rows`."""
        ...

    def first(self, batch: StepBatch, feature_rows: Int32Array) -> DraftedTokens:
        """Draft from features of the target.

        Row i of the T reads row `feature_rows[i]` of the target's last `execute` and embeds
        `batch.token_ids[i]`, the token after that row; position and slot are the feature's.
        `batch.block_copies` is empty: `execute` copies the head's blocks with the target's.
        ValueError on a row that the last `execute` did not have.
        """
        ...

    def further(self, batch: StepBatch, kept_rows: Int32Array) -> DraftedTokens:
        """Draft from the head's own output.

        Row i reads what logit row `kept_rows[i]` of the last `first` or `further` gave, and embeds
        the token drafted there, at the next position and slot. ValueError on a row that the last
        call did not have.
        """
        ...

    def fused_rows(self, feature_rows: Int32Array) -> Float32Array:
        """Return what `first` makes of R rows of the target before it reads their tokens.

        [R, fused_width], for `first_from` of the same head beside the same target elsewhere.
        ValueError on a row that the last `execute` did not have.
        """
        ...

    def first_from(self, batch: StepBatch, fused: Float32Array) -> DraftedTokens:
        """Draft as `first` does, from rows [T, fused_width] of `fused_rows`.

        ValueError on rows of another number or width.
        """
        ...
