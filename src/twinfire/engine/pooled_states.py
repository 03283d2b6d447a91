"""The hidden states of one prompt on their way to its embedding."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from twinfire.protocol.pooling import Pooling


class PooledStates:
    """Takes states in the order of their tokens; those taken before a preemption stay taken."""

    def __init__(self, num_tokens: int, pooling: Pooling) -> None:
        self._num_tokens = num_tokens
        self._pooling = pooling
        self._num_taken = 0
        self._sum: npt.NDArray[np.float64] | None = None

    def rows_wanted(self, start: int, end: int) -> tuple[int, int]:
        """Return the range of positions in [start, end) whose states are needed."""
        if self._pooling == "last":
            return max(start, self._num_tokens - 1), min(end, self._num_tokens)
        return max(start, self._num_taken), min(end, self._num_tokens)

    def take(self, states: npt.NDArray[np.float32]) -> None:
        """Add the states [tokens, hidden_size] of the tokens that come next."""
        # In double precision the order of the chunks is not seen in the result.
        total = states.sum(axis=0, dtype=np.float64)
        self._sum = total if self._sum is None else self._sum + total
        self._num_taken += len(states)

    def vector(self) -> bytes:
        """Return the pooled state as f32, once all tokens are taken."""
        assert self._sum is not None, "no state was taken"
        return (self._sum / self._num_taken).astype(np.float32).tobytes()
