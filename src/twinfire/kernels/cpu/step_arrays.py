"""A step's inputs in the order in which programs take them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinfire.kernels.step_batch import StepBatch

if TYPE_CHECKING:  # Only the stub of the extension names the type.
    from twinfire.kernels.cpu._native import StepArrays


def step_arrays(batch: StepBatch) -> StepArrays:
    """Return the arrays of a batch; nothing is copied."""
    return (
        batch.token_ids,
        batch.positions,
        batch.slots,
        batch.query_starts,
        batch.context_lens,
        batch.block_tables,
        batch.logit_rows,
        batch.block_copies,
    )
