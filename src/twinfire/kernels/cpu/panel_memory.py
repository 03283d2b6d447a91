"""Memory for the panels of a model's matrices: one piece for all of them.

Huge pages need more than a small matrix, and in small pages a step of few rows, which reads all
weights once, takes a tenth longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from twinfire.kernels.cpu._native import allocate_bytes

ALIGNMENT = 4096


def aligned(num_bytes: int) -> int:
    """Return the first multiple of ALIGNMENT that is no less."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def allocate_panels(sizes: Sequence[int]) -> list[npt.NDArray[np.uint8]]:
    """Return zeroed pieces of as many bytes, each at a multiple of ALIGNMENT."""
    ends = list(accumulate(map(aligned, sizes)))
    memory = allocate_bytes(ends[-1] if ends else 0)
    starts = [0, *ends[:-1]]
    return [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]
