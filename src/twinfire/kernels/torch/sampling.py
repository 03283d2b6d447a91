"""Selections over vocabularies by torch, on host arrays that it borrows without copying.

torch leaves open which of several equal values `topk` returns, and 16-bit logits are often equal,
so ties are settled here.
"""

from __future__ import annotations

import numpy as np
import torch

from twinfire.kernels.sampling_ops import (
    Float32Array,
    Int64Array,
    UInt32Array,
    keep_allowed,
)


class TorchSamplingOps:
    """Implements `SamplingOps`."""

    def top_k(self, logits: Float32Array, k: int) -> tuple[Float32Array, Int64Array]:
        """Return the k largest of each row, lowest id first among equals."""
        if not 1 <= k <= logits.shape[1]:
            raise ValueError(f"k is {k}; it must lie in [1, {logits.shape[1]}]")
        rows = torch.from_numpy(logits)
        top_values, top_ids = torch.topk(rows, k, dim=1)
        values, ids = top_values.numpy(), top_ids.numpy()
        self._settle_cut(logits, values, ids)
        by_id = np.argsort(ids, axis=1)
        values, ids = np.take_along_axis(values, by_id, 1), np.take_along_axis(ids, by_id, 1)
        by_value = np.argsort(-values, axis=1, kind="stable")
        return np.take_along_axis(values, by_value, 1), np.take_along_axis(ids, by_value, 1)

    def argmax(self, logits: Float32Array) -> Int64Array:
        """Return the id of each row's largest value, the lowest among equals."""
        return torch.from_numpy(logits).argmax(dim=1).numpy()

    def logsumexp(self, logits: Float32Array) -> Float32Array:
        """Return log(sum(exp(row)))."""
        return torch.from_numpy(logits).logsumexp(dim=1).numpy()

    def keep_allowed(self, row: Float32Array, allowed: UInt32Array) -> None:
        """Set the row to minus infinity where a bit of `allowed` is 0, in place."""
        keep_allowed(row, allowed)

    @staticmethod
    def _settle_cut(logits: Float32Array, values: Float32Array, ids: Int64Array) -> None:
        """Give the places at the cut to the lowest of the ids whose value equals the last one."""
        cut = values[:, -1:]
        taken = (values == cut).sum(axis=1)
        present = torch.from_numpy(logits).eq(torch.from_numpy(cut)).sum(dim=1).numpy()
        for row in np.flatnonzero(present > taken):
            equal = np.flatnonzero(logits[row] == cut[row])
            ids[row, values[row] == cut[row]] = equal[: taken[row]]
