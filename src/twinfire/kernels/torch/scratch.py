"""Buffers that outlive a step, so that large temporaries cost no page faults each time."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor


class Scratch:
    """Named buffers that grow to the largest size asked for. One user at a time per name."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised contiguous tensor, valid until the next `take` of this name."""
        size = prod(shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(size, dtype=dtype, device=self._device)
            self._buffers[name, dtype] = buffer
        return buffer[:size].view(shape)
