"""The few passes over whole vocabularies that drawing tokens needs, on host arrays.

Everything after them works on a handful of candidates, so a sampler needs no array library. Rows
are independent: what a row gives never depends on the rows beside it.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]
Int64Array = npt.NDArray[np.int64]
UInt32Array = npt.NDArray[np.uint32]


class SamplingOps(Protocol):
    """Row-wise selections over `logits` [R, V] float32; only `keep_allowed` changes its input."""

    def top_k(self, logits: Float32Array, k: int) -> tuple[Float32Array, Int64Array]:
        """Return the k largest values of each row and their ids, both [R, k], largest first.

        Among equal values the lowest id comes first, at the cut as well. ValueError unless 1 <= k
        <= V.
        """
        ...

    def argmax(self, logits: Float32Array) -> Int64Array:
        """Return the id of each row's largest value [R], the lowest one among equals."""
        ...

    def logsumexp(self, logits: Float32Array) -> Float32Array:
        """Return log(sum(exp(row))) of each row [R]."""
        ...

    def keep_allowed(self, row: Float32Array, allowed: UInt32Array) -> None:
        """Set `row` [V] to minus infinity where bit i % 32 of `allowed[i // 32]` is 0, in place.

        ValueError when `allowed` has fewer than V bits.
        """
        ...


def keep_allowed(row: Float32Array, allowed: UInt32Array) -> None:
    """Do what `SamplingOps.keep_allowed` says, in numpy."""
    if 32 * len(allowed) < len(row):
        raise ValueError(f"allowed has {len(allowed)} words; {len(row)} tokens need more")
    little_endian = allowed.astype("<u4", copy=False).view(np.uint8)
    bits = np.unpackbits(little_endian, count=len(row), bitorder="little")
    row[bits == 0] = -np.inf
