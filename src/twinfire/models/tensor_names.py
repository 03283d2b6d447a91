"""The tensors that a dense decoder is made of: names, and a check before anything is packed.

A wrong or cut download is reported whole: every missing tensor and every wrong shape at once.
"""

from __future__ import annotations

from collections.abc import Mapping

from twinfire.artifacts.model_config import ModelConfig
from twinfire.artifacts.tensor_layout import expected_shapes
from twinfire.artifacts.tensors import WeightSource
from twinfire.protocol.errors import ModelError

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
OUTPUT_HEAD = "lm_head.weight"
_MOST_NAMED = 8


def layer_prefix(layer: int) -> str:
    """Return what the names of a layer's tensors begin with."""
    return f"model.layers.{layer}."


def check_tensors(config: ModelConfig, weights: WeightSource) -> None:
    """Raise ModelError naming the tensors that are missing or of another shape."""
    check_shapes(expected_shapes(config), weights, "the model")


def check_shapes(shapes: Mapping[str, tuple[int, ...]], weights: WeightSource, owner: str) -> None:
    """Raise ModelError naming which of `shapes` `owner` lacks or has otherwise."""
    missing = [name for name in shapes if name not in weights]
    if missing:
        raise ModelError(f"{owner} lacks {len(missing)} tensors: {_listed(missing)}")
    wrong = [
        f"{name} is {list(actual)}, not {list(shape)}"
        for name, shape in shapes.items()
        if (actual := tuple(weights.tensor(name).shape)) != shape
    ]
    if wrong:
        raise ModelError(f"{owner} has {len(wrong)} tensors of a wrong shape: {_listed(wrong)}")


def _listed(items: list[str]) -> str:
    shown = ", ".join(items[:_MOST_NAMED])
    return shown if len(items) <= _MOST_NAMED else f"{shown} and {len(items) - _MOST_NAMED} more"
