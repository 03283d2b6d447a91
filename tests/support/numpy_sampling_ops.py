"""The sampler's reductions in plain numpy, as the naive twin of the kernels' own."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from twinfire.kernels.sampling_ops import keep_allowed


class NumpySamplingOps:
    def argmax(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
        return np.argmax(logits, axis=1)

    def top_k(
        self, logits: npt.NDArray[np.float32], k: int
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        ids = np.argsort(-logits, axis=1, kind="stable")[:, :k]
        return np.take_along_axis(logits, ids, axis=1), ids

    def logsumexp(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        wide = logits.astype(np.float64)
        largest = wide.max(axis=1, keepdims=True)
        total = np.exp(wide - largest).sum(axis=1)
        return (largest[:, 0] + np.log(total)).astype(np.float32)

    def keep_allowed(self, row: npt.NDArray[np.float32], allowed: npt.NDArray[np.uint32]) -> None:
        keep_allowed(row, allowed)
