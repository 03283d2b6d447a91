"""Weight formats on disk, and their values as float32.

Owns the sizes of the GGUF block formats that Twinfire reads and the loop that dequantises them.
The arithmetic of a block is the `gguf` library's; it is imported on first use only, because a
process that reads no block format should not pay for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FLOAT_FORMATS: dict[str, np.dtype[np.generic]] = {
    "f32": np.dtype("<f4"),
    "f16": np.dtype("<f2"),
    "bf16": np.dtype("<u2"),
}
"""Plain formats and the dtype that `MappedTensor.raw` has for them."""

CHUNK_VALUES = 1 << 17
"""Values dequantised at once: half a megabyte of float32 stays in the core's cache."""


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """`values` consecutive values of a row lie in `size_bytes` bytes."""

    values: int
    size_bytes: int


BLOCK_FORMATS = {
    "q4_0": BlockFormat(32, 18),
    "q4_1": BlockFormat(32, 20),
    "q8_0": BlockFormat(32, 34),
    "q4_k": BlockFormat(256, 144),
    "q6_k": BlockFormat(256, 210),
}
SUPPORTED_FORMATS = (*FLOAT_FORMATS, *BLOCK_FORMATS)


def to_float32(
    format_name: str, raw: npt.NDArray[np.generic], shape: tuple[int, ...]
) -> npt.NDArray[np.float32]:
    """Return the values of `raw` as C-contiguous float32 of `shape`; a view where none change."""
    if format_name == "f32":
        return np.require(raw, np.float32, ("C", "A")).reshape(shape)
    if format_name == "f16":
        return raw.astype(np.float32, order="C").reshape(shape)
    if format_name == "bf16":
        # A bfloat16 is the upper half of the float32 with the same value.
        widened = np.left_shift(raw, 16, dtype=np.uint32)
        return np.ascontiguousarray(widened).view(np.float32).reshape(shape)
    return _dequantize(format_name, raw).reshape(shape)


def _dequantize(format_name: str, raw: npt.NDArray[np.generic]) -> npt.NDArray[np.float32]:
    layout = BLOCK_FORMATS[format_name]
    decode_blocks = _block_decoder(format_name)
    blocks = np.ascontiguousarray(raw).view(np.uint8).reshape(-1, layout.size_bytes)
    values = np.empty((len(blocks), layout.values), np.float32)
    step = CHUNK_VALUES // layout.values
    for start in range(0, len(blocks), step):
        values[start : start + step] = decode_blocks(blocks[start : start + step])
    return values


def _block_decoder(
    format_name: str,
) -> Callable[[npt.NDArray[np.uint8]], npt.NDArray[np.float32]]:
    from gguf import quants

    decoders = {
        "q4_0": quants.Q4_0.dequantize_blocks,
        "q4_1": quants.Q4_1.dequantize_blocks,
        "q8_0": quants.Q8_0.dequantize_blocks,
        "q4_k": quants.Q4_K.dequantize_blocks,
        "q6_k": quants.Q6_K.dequantize_blocks,
    }
    return decoders[format_name]
