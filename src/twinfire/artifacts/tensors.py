"""A named weight as it lies on disk: mapped, not copied, not converted.

Names are the Hugging Face ones (`model.layers.0.self_attn.q_proj.weight`) whatever the file
calls them, and row order is the Hugging Face one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from twinfire.artifacts.block_formats import to_float32


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """One weight. `raw` is little-endian disk content, possibly a read-only view of a mapping."""

    name: str
    shape: tuple[int, ...]
    """Logical shape in elements: [out, in] for a matrix."""
    format: str
    """f32, f16, bf16, or a GGUF block format (q8_0, q4_0, q4_1, q4_k, q6_k)."""
    raw: npt.NDArray[np.generic]
    """f32 and f16 as their dtype, bf16 as uint16, block formats as uint8 [rows, bytes_per_row]."""

    def to_float32(self) -> npt.NDArray[np.float32]:
        """Return the values, dequantised, as a C-contiguous float32 array of `shape`.

        An f32 tensor comes as a view of `raw`, hence read-only where the file is mapped.
        """
        return to_float32(self.format, self.raw, self.shape)


class WeightSource(Protocol):
    """Where the tensors of one model come from."""

    def __contains__(self, name: str) -> bool:
        """Whether the model has this tensor."""
        ...

    def __iter__(self) -> Iterator[str]:
        """Yield every name."""
        ...

    def tensor(self, name: str) -> MappedTensor:
        """Return a tensor; ModelError naming it when it is missing."""
        ...

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors on disk."""
        ...
