"""The tokens that a choice has seen, in the form that penalties need.

Counts are kept as the output grows, so that a step costs the number of distinct tokens and not the
length of the text. Prompt tokens count for the repetition penalty only.
"""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt


class TokenHistory:
    """Output tokens of one choice with their counts, after a fixed prompt."""

    def __init__(self, prompt: array[int]) -> None:
        self._prompt = prompt
        self._prompt_ids: npt.NDArray[np.int64] | None = None
        self._output_counts: dict[int, int] = {}
        self.output: array[int] = array("I")

    def append(self, token_id: int) -> None:
        """Add a drawn token."""
        self.output.append(token_id)
        self._output_counts[token_id] = self._output_counts.get(token_id, 0) + 1

    @property
    def num_output(self) -> int:
        """Output tokens so far."""
        return len(self.output)

    def output_counts(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Return the distinct output ids and how often each occurred."""
        ids = np.fromiter(self._output_counts.keys(), np.int64, len(self._output_counts))
        counts = np.fromiter(self._output_counts.values(), np.float32, len(self._output_counts))
        return ids, counts

    def seen_ids(self) -> npt.NDArray[np.int64]:
        """Return the distinct ids of prompt and output."""
        if self._prompt_ids is None:
            self._prompt_ids = np.unique(np.frombuffer(self._prompt, np.uint32).astype(np.int64))
        output_ids = np.fromiter(self._output_counts.keys(), np.int64, len(self._output_counts))
        return np.union1d(self._prompt_ids, output_ids)
