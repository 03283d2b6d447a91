"""Selections over vocabularies by the native kernels."""

from __future__ import annotations

from twinfire.kernels.cpu import _native
from twinfire.kernels.sampling_ops import Float32Array, Int64Array, UInt32Array


class NativeSamplingOps:
    """Implements `SamplingOps`."""

    def __init__(self, isa: str | None = None) -> None:
        self._isa = isa or _native.isa()

    def top_k(self, logits: Float32Array, k: int) -> tuple[Float32Array, Int64Array]:
        """Return the k largest of each row, lowest id first among equals."""
        return _native.top_k(self._isa, logits, k)

    def argmax(self, logits: Float32Array) -> Int64Array:
        """Return the id of each row's largest value, the lowest among equals."""
        return _native.argmax(self._isa, logits)

    def logsumexp(self, logits: Float32Array) -> Float32Array:
        """Return log(sum(exp(row)))."""
        return _native.logsumexp(self._isa, logits)

    def keep_allowed(self, row: Float32Array, allowed: UInt32Array) -> None:
        """Set the row to minus infinity where a bit of `allowed` is 0, in place."""
        _native.keep_allowed(self._isa, row, allowed)
