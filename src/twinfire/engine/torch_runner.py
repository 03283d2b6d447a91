"""A model on the torch op set, with its KV memory.

Implements `Runner`. float32 on CPU runs the exact strategy, everything else the fast one. Owns
the order of a step (copies, layers, kept rows); computes nothing itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twinfire.artifacts.model_config import ModelConfig
from twinfire.artifacts.tensors import WeightSource
from twinfire.cache.kv_group import BLOCK_SIZE, KvGroup, KvLayout, WireBuffer, WireBytes
from twinfire.engine.runner import LoadProgress
from twinfire.kernels.step_batch import StepBatch
from twinfire.kernels.torch.dtypes import torch_dtype
from twinfire.kernels.torch.exact import ExactNumerics
from twinfire.kernels.torch.fast import FastNumerics
from twinfire.kernels.torch.kv_memory import KvMemory
from twinfire.kernels.torch.numerics import Numerics
from twinfire.kernels.torch.step import TorchStep
from twinfire.kernels.torch.weights import TorchWeights
from twinfire.models.decoder import Decoder
from twinfire.models.registry import build_model
from twinfire.protocol.errors import ModelError

TARGET_GROUP = "target"
"""The KV group of the served model itself."""


class TorchRunner:
    """Made by `load_torch_runner`."""

    def __init__(
        self,
        config: ModelConfig,
        model: Decoder,
        weights: TorchWeights,
        numerics: Numerics,
        dtype: str,
        device: torch.device,
    ) -> None:
        self._config = config
        self._model = model
        self._weights = weights
        self._numerics = numerics
        self._device = device
        self._group = KvGroup(
            TARGET_GROUP, config.num_layers, config.num_kv_heads, config.head_dim, dtype
        )
        self._kv: KvMemory | None = None
        self._step: TorchStep | None = None
        self._hidden_rows: Tensor | None = None

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return self._config.vocab_size

    @property
    def kv_layout(self) -> KvLayout:
        """One group, in the element type of the model."""
        return KvLayout((self._group,))

    @property
    def weight_bytes(self) -> int:
        """Memory that the packed weights take."""
        return self._weights.num_bytes

    def init_kv(self, num_blocks: int) -> None:
        """Allocate KV memory, once; pages are only taken as blocks are written."""
        if self._kv is not None:
            raise RuntimeError("KV memory is already allocated")
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; it must be at least 1")
        self._kv = KvMemory(self._group, num_blocks, BLOCK_SIZE, self._device)

    @torch.inference_mode()
    def execute(self, batch: StepBatch) -> None:
        """Copy blocks, compute the tokens, write their KV, keep the rows of `logit_rows`."""
        kv = self._allocated()
        if len(batch.block_copies):
            kv.copy_blocks(batch.block_copies)
        self._step = TorchStep(self._weights, self._numerics, kv, batch)
        self._hidden_rows = self._model.hidden_rows(self._step)

    @torch.inference_mode()
    def logits(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Return float32 logits [stop - start, vocab_size] of kept rows [start, stop)."""
        if self._step is None or self._hidden_rows is None:
            raise RuntimeError("nothing has been executed")
        if not 0 <= start <= stop <= len(self._hidden_rows):
            raise ValueError(f"rows [{start}, {stop}) of {len(self._hidden_rows)} kept rows")
        if start == stop:
            return np.empty((0, self._config.head_width), dtype=np.float32)
        logits = self._model.logits(self._step, self._hidden_rows[start:stop])
        return logits.to(device="cpu", dtype=torch.float32).contiguous().numpy()

    @torch.inference_mode()
    def export_blocks(self, block_ids: Sequence[int], into: WireBuffer) -> None:
        """Write the blocks to `into`; ValueError on a block that is none or a wrong size."""
        self._allocated().export_blocks(block_ids, into)

    @torch.inference_mode()
    def import_blocks(self, block_ids: Sequence[int], content: WireBytes) -> None:
        """Fill blocks from what `export_blocks` wrote; ValueError likewise."""
        self._allocated().import_blocks(block_ids, content)

    def _allocated(self) -> KvMemory:
        if self._kv is None:
            raise RuntimeError("init_kv has not been called")
        return self._kv


@torch.inference_mode()
def load_torch_runner(
    config: ModelConfig,
    weights: WeightSource,
    *,
    dtype: str,
    num_threads: int,
    progress: LoadProgress,
    device: str = "cpu",
) -> TorchRunner:
    """Build and pack a model.

    `dtype` is f32, bf16 or (GPU only) f16. `num_threads` is set for all of torch in this process.
    ModelError names a tensor that is missing or misshapen, or a setting that the device lacks.
    """
    target, element = torch.device(device), torch_dtype(dtype)
    if target.type == "cpu" and dtype == "f16":
        raise ModelError("dtype f16 needs a GPU; on CPU use bf16 or f32")
    if target.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"device {device!r} was asked for and torch sees no CUDA device")
    torch.set_num_threads(num_threads)
    exact = target.type == "cpu" and element == torch.float32
    numerics: Numerics = ExactNumerics() if exact else FastNumerics(target, element)
    total_bytes, done_bytes = weights.total_bytes, 0

    def on_bytes(num_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += num_bytes
        progress("weights", min(done_bytes, total_bytes), total_bytes)

    packed = TorchWeights(numerics.pack, element, target, on_bytes)
    model = build_model(config, weights, packed)
    progress("weights", total_bytes, total_bytes)
    return TorchRunner(config, model, packed, numerics, dtype, target)
