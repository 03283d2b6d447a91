"""What the step loop asks of a model on a device. Siblings implement it; none patches another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from twinfire.cache.kv_group import KvLayout, WireBuffer, WireBytes
from twinfire.engine.draft_runner import DraftRunner
from twinfire.kernels.step_batch import StepBatch

LoadProgress = Callable[[str, int, int], None]
"""Called with (stage, done, total) while weights load; total 0 when unknown."""


class Runner(Protocol):
    """A loaded model with its KV memory. Not thread-safe: the step loop owns it."""

    @property
    def draft(self) -> DraftRunner | None:
        """The draft head beside the model, None without one. It reads what `execute` kept."""
        ...

    @property
    def vocab_size(self) -> int:
        """How many token ids there are."""
        ...

    @property
    def kv_layout(self) -> KvLayout:
        """Groups and block size of the KV cache."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Memory that the packed weights take."""
        ...

    def init_kv(self, num_blocks: int) -> None:
        """Allocate KV memory, once, before the first step."""
        ...

    def populate_kv(self, first: int, count: int) -> None:
        """Take the pages of blocks [first, first + count) from the system; may run beside steps."""
        ...

    def execute(self, batch: StepBatch) -> None:
        """Copy blocks, compute the tokens, write their KV, keep the rows of `logit_rows`."""
        ...

    def logits(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Return float32 logits [stop - start, vocab_size] of kept rows [start, stop).

        Of an embedding model these are the hidden states [stop - start, hidden_size].
        The array is the caller's to modify until the next call of `execute` or `logits`.
        """
        ...

    def export_blocks(self, block_ids: Sequence[int], into: WireBuffer) -> None:
        """Write the blocks' content to `into` in the canonical wire layout, block after block.

        ValueError on a block that is none and when the size does not fit.
        """
        ...

    def import_blocks(self, block_ids: Sequence[int], content: WireBytes) -> None:
        """Fill blocks from what `export_blocks` wrote; ValueError likewise."""
        ...
