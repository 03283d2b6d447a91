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


@dataclass(frozen=True, slots=True)
class DraftedTokens:
    """The head's first choice for each of R logit rows."""

    token_ids: npt.NDArray[np.int64]
    """[R] ids of the target's vocabulary."""
    probabilities: npt.NDArray[np.float32]
    """[R] the choice's share of the softmax over the draft vocabulary."""


class DraftRunner(Protocol):
    """A loaded head. Belongs to its runner's step loop; needs the runner's `init_kv`."""

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
