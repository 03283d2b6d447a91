"""What the target computed for every sample, kept on disk so that each epoch only reads it.

Rows of bfloat16, features and final state side by side, sample after sample in the samples' order.
A killed run leaves a part of a sample at most, which the next one computes again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from twinfire.training.sample import Sample
from twinfire.training.target_states import TargetStates, TextStates


class FeatureStore:
    """The states of `samples`. `feature_width` and `final_width` in elements."""

    def __init__(
        self, path: Path, samples: Sequence[Sample], feature_width: int, final_width: int
    ) -> None:
        self._path = path
        self._samples = samples
        self._feature_width = feature_width
        self._row_width = feature_width + final_width
        lengths = [len(sample.tokens) for sample in samples]
        self._starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)

    @property
    def num_complete(self) -> int:
        """Samples whose states are on disk."""
        if not self._path.is_file():
            return 0
        num_rows = self._path.stat().st_size // (2 * self._row_width)
        return int(np.searchsorted(self._starts, num_rows, side="right")) - 1

    def fill(self, target: TargetStates, progress: Callable[[int, int], None]) -> None:
        """Compute what is missing; `progress` is told tokens done and in all."""
        first = self.num_complete
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.truncate(int(self._starts[first]) * 2 * self._row_width)
            while first < len(self._samples):
                end = self._end_of_step(first, target.max_tokens)
                texts = [sample.tokens for sample in self._samples[first:end]]
                for states in target.compute(texts):
                    rows = torch.cat([states.features, states.final], dim=1)
                    file.write(rows.view(torch.int16).numpy().tobytes())
                file.flush()
                first = end
                progress(int(self._starts[first]), int(self._starts[-1]))

    def states(self, index: int) -> TextStates:
        """Return the states of one sample."""
        start, end = int(self._starts[index]), int(self._starts[index + 1])
        content = np.fromfile(
            self._path,
            np.int16,
            (end - start) * self._row_width,
            offset=start * 2 * self._row_width,
        )
        rows: Tensor = torch.from_numpy(content).view(torch.bfloat16).view(-1, self._row_width)
        return TextStates(rows[:, : self._feature_width], rows[:, self._feature_width :])

    def _end_of_step(self, first: int, max_tokens: int) -> int:
        budget = int(self._starts[first]) + max_tokens
        end = int(np.searchsorted(self._starts, budget, side="right")) - 1
        return max(first + 1, end)
