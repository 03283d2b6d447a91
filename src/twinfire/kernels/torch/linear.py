"""Matrices packed once for the multiply, and the packers to choose from.

oneDNN's packed multiply reads a weight at about twice the speed of an unpacked one for few rows,
but torch keeps those ops private: `choose_packer` tries one against the plain multiply and falls
back to it. Never keeps the unpacked weight beside a packed one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor


class Linear(Protocol):
    """x [rows, in] -> x @ weight.T + bias [rows, out], in the weight's element type."""

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply."""
        ...

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        ...


class Packer(Protocol):
    """Makes a `Linear` from a weight [out, in] and a bias [out]."""

    def __call__(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Pack; the caller drops its weight."""
        ...


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """The multiply that every torch device has."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply."""
        return F.linear(x, self.weight, self.bias)

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return _num_bytes(self.weight) + _num_bytes(self.bias)


class OneDnnLinear:
    """A weight in oneDNN's own blocked layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self._bias = bias
        self._num_bytes = _num_bytes(weight) + _num_bytes(bias)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self._bias, "none", [], ""
        )
        return product

    @property
    def num_bytes(self) -> int:
        """Memory held, but for the padding of blocks."""
        return self._num_bytes


@dataclass(frozen=True, slots=True)
class PerHeadLinear:
    """A matrix for each head: x [rows, heads * in] -> [rows, heads * out]."""

    weight: Tensor
    """[heads, out, in]"""

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply."""
        heads, _, width = self.weight.shape
        by_head = x.view(len(x), heads, width).transpose(0, 1)
        return torch.bmm(by_head, self.weight.transpose(1, 2)).transpose(0, 1).flatten(1)

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return _num_bytes(self.weight)


@dataclass(frozen=True, slots=True)
class TiledLinear:
    """Runs another `Linear` on tiles of exactly `tile_rows` rows, the last one padded with zeros.

    The order of a multiply's sums may depend on its shape. With one shape for every tile a row's
    bits depend on the row alone.
    """

    inner: Linear
    tile_rows: int

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply."""
        num_rows = x.shape[0]
        padding = -num_rows % self.tile_rows
        if padding:
            x = F.pad(x, (0, 0, 0, padding))
        tiles = [self.inner(tile) for tile in torch.split(x, self.tile_rows)]
        product = tiles[0] if len(tiles) == 1 else torch.cat(tiles)
        return product[:num_rows]

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return self.inner.num_bytes


def choose_packer(device: torch.device, dtype: torch.dtype) -> Packer:
    """Return oneDNN's packer where it works and agrees with the plain multiply."""
    if device.type == "cpu" and _onednn_agrees(dtype):
        return OneDnnLinear
    return PlainLinear


def _onednn_agrees(dtype: torch.dtype) -> bool:
    steps = torch.arange(6 * 40, dtype=torch.float32)
    weight = torch.sin(steps).view(6, 40).to(dtype)
    bias = torch.cos(steps[:6]).to(dtype)
    x = torch.cos(steps[: 3 * 40]).view(3, 40).to(dtype)
    try:
        product = OneDnnLinear(weight, bias)(x)
    except (AttributeError, RuntimeError, TypeError):
        return False
    expected = F.linear(x.float(), weight.float(), bias.float())
    return bool(torch.allclose(product.float(), expected, rtol=2e-2, atol=2e-2))


def _num_bytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()
