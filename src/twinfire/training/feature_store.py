"""What the target computed for every sample, kept on disk so that each epoch only reads it.

Rows of bfloat16, features and final state side by side, sample after sample in the samples' order.
Beside them a mark for each sample says what its rows were computed from. A killed run leaves a part
of a sample at most, which the next one computes again, as it does from the first other sample on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from twinfire.training.sample import Sample
from twinfire.training.target_states import TargetStates, TextStates

_MARK_BYTES = 16
_MOST_TEXTS = 512
"""That are computed in one step."""


class FeatureStore:
    """The states of `samples`. `feature_width` and `final_width` in elements."""

    def __init__(
        self,
        path: Path,
        samples: Sequence[Sample],
        feature_width: int,
        final_width: int,
        source: str,
    ) -> None:
        """`source` names the target and what is kept of it."""
        self._path = path
        self._marks_path = path.with_suffix(".marks")
        self._samples = samples
        self._source = source.encode()
        self._feature_width = feature_width
        self._row_width = feature_width + final_width
        lengths = [len(sample.tokens) for sample in samples]
        self._starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)

    @property
    def num_complete(self) -> int:
        """Samples whose states are on disk."""
        if not (self._path.is_file() and self._marks_path.is_file()):
            return 0
        num_rows = self._path.stat().st_size // (2 * self._row_width)
        num_whole = int(np.searchsorted(self._starts, num_rows, side="right")) - 1
        marks = self._marks_path.read_bytes()
        for number, sample in enumerate(self._samples[:num_whole]):
            if marks[number * _MARK_BYTES : (number + 1) * _MARK_BYTES] != self._mark(sample):
                return number
        return num_whole

    def fill(self, target: TargetStates, progress: Callable[[int, int], None]) -> None:
        """Compute what is missing; `progress` is told tokens done and in all."""
        first = self.num_complete
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file, self._marks_path.open("ab") as marks:
            file.truncate(int(self._starts[first]) * 2 * self._row_width)
            marks.truncate(first * _MARK_BYTES)
            while first < len(self._samples):
                texts = [sample.tokens for sample in self._samples[first : first + _MOST_TEXTS]]
                texts = texts[: max(1, target.num_fitting(list(map(len, texts))))]
                for states in target.compute(texts):
                    rows = torch.cat([states.features, states.final], dim=1)
                    file.write(rows.view(torch.int16).numpy().tobytes())
                file.flush()
                end = first + len(texts)
                marks.write(b"".join(map(self._mark, self._samples[first:end])))
                marks.flush()
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

    def _mark(self, sample: Sample) -> bytes:
        return sha256(self._source + np.array(sample.tokens, "<u4").tobytes()).digest()[
            :_MARK_BYTES
        ]
