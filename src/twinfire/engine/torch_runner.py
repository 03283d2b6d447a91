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

from twinfire.artifacts.draft_head import DraftHead
from twinfire.artifacts.model_config import ModelConfig
from twinfire.artifacts.tensors import WeightSource
from twinfire.cache.kv_group import KvGroup, KvLayout, WireBuffer, WireBytes
from twinfire.engine.feature_layers import FeatureLayers, feature_layers_of
from twinfire.engine.runner import LoadProgress
from twinfire.engine.torch_draft import TorchDraftRunner, draft_kv_group
from twinfire.engine.torch_kv import TorchKv
from twinfire.kernels.step_batch import StepBatch
from twinfire.kernels.torch.dtypes import torch_dtype
from twinfire.kernels.torch.exact import ExactNumerics
from twinfire.kernels.torch.fast import FastNumerics
from twinfire.kernels.torch.numerics import Numerics
from twinfire.kernels.torch.step import TorchStep
from twinfire.kernels.torch.weights import TorchWeights
from twinfire.models.decoder import Decoder
from twinfire.models.eagle3_head import Eagle3Head
from twinfire.models.registry import build_model
from twinfire.protocol.errors import ModelError

TARGET_GROUP = "target"
"""The KV group of the served model itself."""


class TorchRunner:
    """Made by `load_torch_runner`. `draft` is the head beside the model, if it has one."""

    def __init__(
        self,
        config: ModelConfig,
        model: Decoder,
        weights: TorchWeights,
        numerics: Numerics,
        kv: TorchKv,
        features: FeatureLayers,
        draft: TorchDraftRunner | None,
    ) -> None:
        self.draft = draft
        self._config = config
        self._model = model
        self._weights = weights
        self._numerics = numerics
        self._kv = kv
        self._features = features
        self._step: TorchStep | None = None
        self._hidden_rows: Tensor | None = None

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return self._config.vocab_size

    @property
    def kv_layout(self) -> KvLayout:
        """The target group, then a draft head's, in the element type of the model."""
        return self._kv.layout

    @property
    def weight_bytes(self) -> int:
        """Memory that the packed weights take, a draft head's included."""
        return self._weights.num_bytes + (self.draft.weight_bytes if self.draft else 0)

    def init_kv(self, num_blocks: int) -> None:
        """Allocate KV memory, once; pages are only taken as blocks are written."""
        self._kv.allocate(num_blocks)

    def populate_kv(self, first: int, count: int) -> None:
        """Do nothing: torch takes pages as it likes."""

    @torch.inference_mode()
    def execute(self, batch: StepBatch) -> None:
        """Copy blocks, compute the tokens, write their KV, keep the rows of `logit_rows`."""
        self._kv.copy_blocks(batch.block_copies)
        self._step = TorchStep(self._weights, self._numerics, self._kv.memory(0), batch)
        self._hidden_rows = self._model.hidden_rows(
            self._step, self._features.layers, keep_final=self._features.keep_final
        )
        if self.draft is not None:
            self.draft.target_features = self._step.features

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
        self._kv.export_blocks(block_ids, into)

    @torch.inference_mode()
    def import_blocks(self, block_ids: Sequence[int], content: WireBytes) -> None:
        """Fill blocks from what `export_blocks` wrote; ValueError likewise."""
        self._kv.import_blocks(block_ids, content)


def free_device_bytes(device: str) -> int:
    """Return what is free of a CUDA device's memory."""
    free, _ = torch.cuda.mem_get_info(torch.device(device))
    return int(free)


@torch.inference_mode()
def load_torch_runner(
    config: ModelConfig,
    weights: WeightSource,
    *,
    dtype: str,
    num_threads: int,
    progress: LoadProgress,
    device: str = "cpu",
    head: DraftHead | None = None,
) -> TorchRunner:
    """Build and pack a model, and the draft `head` beside it.

    `dtype` is f32, bf16 or (GPU only) f16. `num_threads` is set for all of torch in this process.
    ModelError names a tensor that is missing or misshapen, a setting that the device lacks, or what
    does not fit of a head.
    """
    features = feature_layers_of(head, config)
    target, element = torch.device(device), torch_dtype(dtype)
    if target.type == "cpu" and dtype == "f16":
        raise ModelError("dtype f16 needs a GPU; on CPU use bf16 or f32")
    if target.type == "cuda" and (target.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ModelError(f"device {device!r} was asked for and torch sees {count} CUDA devices")
    torch.set_num_threads(num_threads)
    exact = target.type == "cpu" and element == torch.float32
    numerics: Numerics = ExactNumerics() if exact else FastNumerics(target, element)
    total_bytes, done_bytes = weights.total_bytes, 0
    if head is not None:
        total_bytes += head.weights.total_bytes

    def on_bytes(num_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += num_bytes
        progress("weights", min(done_bytes, total_bytes), total_bytes)

    packed = TorchWeights(numerics.pack, element, target, on_bytes)
    model = build_model(config, weights, packed)
    group = KvGroup(TARGET_GROUP, config.num_layers, config.num_kv_heads, config.head_dim, dtype)
    draft, kv = None, TorchKv([group], target)
    if head is not None:
        kv = TorchKv([group, draft_kv_group(head, dtype)], target)
        draft_weights = TorchWeights(
            numerics.pack, element, target, on_bytes, numerics.pack_per_head
        )
        embedding = packed.embedding_at(model.embedding)
        shared = draft_weights.share_embedding(embedding, config.hidden_size)
        body = Eagle3Head(head.config, head.weights, draft_weights, shared)
        draft = TorchDraftRunner(body, head.draft_ids, draft_weights, numerics, kv)
    progress("weights", total_bytes, total_bytes)
    return TorchRunner(config, model, packed, numerics, kv, features, draft)
