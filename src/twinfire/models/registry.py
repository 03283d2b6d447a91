"""Which body an architecture has."""

from __future__ import annotations

from twinfire.artifacts.model_config import SUPPORTED_ARCHITECTURES, ModelConfig
from twinfire.artifacts.tensors import WeightSource
from twinfire.kernels.ops import WeightOps
from twinfire.models.decoder import Decoder
from twinfire.protocol.errors import ModelError

_DENSE_DECODERS = frozenset({"llama", "mistral", "qwen2", "qwen3"})


def build_model(config: ModelConfig, weights: WeightSource, ops: WeightOps) -> Decoder:
    """Build a model over an op set; ModelError when it is not supported or not whole."""
    if config.architecture not in _DENSE_DECODERS:
        known = ", ".join(SUPPORTED_ARCHITECTURES)
        raise ModelError(
            f"architecture {config.architecture!r} is not supported; these are: {known}"
        )
    if config.num_layers < 1:
        raise ModelError("num_layers must be at least 1")
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"num_heads {config.num_heads} is no multiple of num_kv_heads {config.num_kv_heads}"
        )
    return Decoder(config, weights, ops)
