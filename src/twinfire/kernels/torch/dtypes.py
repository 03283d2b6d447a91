"""Element types by the names that configurations use, and mapped weights as tensors."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twinfire.artifacts.tensors import MappedTensor
from twinfire.protocol.errors import ModelError

TORCH_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def torch_dtype(name: str) -> torch.dtype:
    """Return the type called `name`; ModelError with the known names otherwise."""
    if name not in TORCH_DTYPES:
        raise ModelError(f"unknown dtype {name!r}; known: {', '.join(TORCH_DTYPES)}")
    return TORCH_DTYPES[name]


def read_tensor(mapped: MappedTensor, dtype: torch.dtype) -> Tensor:
    """Return a weight as a tensor of its shape and `dtype`; never a view of read-only memory."""
    if mapped.format == "bf16":
        stored = torch.from_numpy(_writable(mapped.raw.view(np.int16))).view(torch.bfloat16)
    elif mapped.format in ("f32", "f16"):
        stored = torch.from_numpy(_writable(mapped.raw))
    else:
        stored = torch.from_numpy(mapped.to_float32())
    return stored.view(mapped.shape).to(dtype)


def _writable(array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    # torch refuses to promise anything about read-only memory, so a mapping is copied.
    return array if array.flags.writeable else array.copy()
