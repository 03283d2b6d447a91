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


class SamplingOps(Protocol):
    """Row-wise selections over `logits` [R, V] float32; the input is never changed."""

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
