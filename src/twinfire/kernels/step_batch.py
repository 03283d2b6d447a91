"""The inputs of one forward pass: many sequences packed end to end, with no padding.

A sequence's part is a prompt chunk, one decoded token or a row of drafts; the arrays do not tell
which, so one attention call serves them all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """T tokens of S sequences; R rows need logits. KV of a token lies at `slots`."""

    token_ids: Int32Array
    """[T]"""
    positions: Int32Array
    """[T] position of each token in its sequence."""
    slots: Int32Array
    """[T] block_id * block_size + offset."""
    query_starts: Int32Array
    """[S + 1] first token of each sequence in the packed arrays."""
    context_lens: Int32Array
    """[S] tokens of the sequence that have KV once this step has run."""
    block_tables: Int32Array
    """[S, B] block ids; unused entries are 0."""
    logit_rows: Int32Array
    """[R] indices into the T tokens."""
    block_copies: Int32Array
    """[C, 2] (source, destination) block ids, to be copied before anything is written."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.context_lens)
