"""Native runners, loaded with nothing shown."""

from __future__ import annotations

import numpy as np

from support.tiny_models import ArrayWeights
from twinfire.artifacts.draft_head import DraftHead
from twinfire.artifacts.model_config import ModelConfig
from twinfire.artifacts.tensors import WeightSource
from twinfire.engine.native_runner import NativeRunner, load_native_runner
from twinfire.kernels.cpu._native import PackedMatrix, allocate_bytes, pack_panels, row_to_f32
from twinfire.kernels.cpu.weight_cache import WeightCache
from twinfire.kernels.cpu.weight_formats import packed_format
from twinfire.protocol.worker_config import Quantization


def load_native(
    config: ModelConfig,
    weights: WeightSource,
    quantization: Quantization = "auto",
    *,
    kv_dtype: str = "bf16",
    num_threads: int = 1,
    num_borrowed_threads: int = 0,
    isa: str | None = None,
    op_by_op: bool = False,
    cache: WeightCache | None = None,
    head: DraftHead | None = None,
) -> NativeRunner:
    """Load."""
    return load_native_runner(
        config,
        weights,
        quantization=quantization,
        kv_dtype=kv_dtype,
        num_threads=num_threads,
        num_borrowed_threads=num_borrowed_threads,
        progress=lambda stage, done, total: None,
        isa=isa,
        op_by_op=op_by_op,
        cache=cache,
        head=head,
    )


def rounded_weights(weights: ArrayWeights, quantization: Quantization) -> ArrayWeights:
    """Return the weights as the packed matrices hold them, so that only the arithmetic differs."""
    rounded = {}
    for name, array in weights.arrays.items():
        is_head = name.startswith(("lm_head", "model.embed_tokens"))
        rounded[name] = array
        if array.ndim == 2:
            format_name = packed_format(["f32"], quantization, is_head=is_head)
            rounded[name] = _round_trip(array, format_name)
    return ArrayWeights(rounded)


def _round_trip(array: np.ndarray, format_name: str) -> np.ndarray:
    shape = (format_name, *array.shape, False, False)
    panels = allocate_bytes(PackedMatrix.num_bytes_of(*shape))
    matrix = PackedMatrix(*shape, panels)
    content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    pack_panels(matrix, panels, [("f32", content)], None, 0, matrix.num_panels)
    unpacked = np.empty_like(array)
    for row in range(len(array)):
        row_to_f32(matrix, row, unpacked[row])
    return unpacked
