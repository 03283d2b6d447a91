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
from twinfire.artifacts.mapped_file import FileRange


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """One weight. `raw` is little-endian disk content, possibly a read-only view of a mapping."""

    name: str
    shape: tuple[int, ...]
    """Logical shape in elements: [out, in] for a matrix."""
    format: str
    """f32, f16, bf16, or a GGUF block format (q8_0, q4_0, q4_1, q4_k, q6_k)."""
    raw: npt.NDArray[np.generic]
    """f32 and f16 as their dtype, bf16 as uint16, block formats as uint8 [rows, bytes_per_row].

    Where the file interleaves the halves of heads, this is a view in the right order, its first
    dimension split into [heads, 2, rows of a half].
    """
    place: FileRange | None = None
    """Where the content lies, None when it is in memory only."""
    interleaved_heads: int = 0
    """Heads whose rows the file has as first, middle, second, middle + 1 and so on; 0: none."""

    def to_float32(self) -> npt.NDArray[np.float32]:
        """Return the values, dequantised, as a C-contiguous float32 array of `shape`.

        An f32 tensor comes as a view of `raw`, hence read-only where the file is mapped.
        """
        return to_float32(self.format, self.raw, self.shape)

    def read_float32(self) -> npt.NDArray[np.float32]:
        """Return the same as `to_float32`, read from the file in one piece."""
        if self.place is None:
            return self.to_float32()
        read = self.place.copy().view(self.raw.dtype)
        if self.interleaved_heads:
            read = halves_in_order(read.reshape(self.shape[0], -1), self.interleaved_heads)
        return to_float32(self.format, read.reshape(self.raw.shape), self.shape)

    def read_ahead(self) -> None:
        """Have the system read the content into its page cache."""
        if self.place is not None:
            self.place.read_ahead()

    @property
    def row_bytes(self) -> int:
        """Bytes on disk of what one index of the first dimension holds."""
        return self.raw.nbytes // self.shape[0]


def halves_in_order(rows: npt.NDArray[np.generic], num_heads: int) -> npt.NDArray[np.generic]:
    """Return interleaved rows as a view [heads, 2, rows of a half, ...] in Hugging Face order.

    Within a head such a file interleaves the two halves: rows (2i, 2i + 1) are (i, i + half).
    """
    return rows.reshape(num_heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2)


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
