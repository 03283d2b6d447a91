"""Which layers of the target an EAGLE-3 head reads, out of numbers that mean two things.

Published files number the same tensors as "output of layer k" (1, 29, 57) or as "state after k
layers" (2, 30, 58), and none says which. Reading one layer off costs acceptance and nothing else,
so the convention is inferred, told in the log, and can be overruled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from twinfire.artifacts.fields import Fields, shown
from twinfire.protocol.errors import InvalidRequest, ModelError

Convention = Literal["layers_passed", "layer_outputs"]
LAYERS_PASSED: Convention = "layers_passed"
LAYER_OUTPUTS: Convention = "layer_outputs"
IDS_FIELD = "eagle_aux_hidden_state_layer_ids"
CONVENTION_FIELD = "aux_layer_convention"
"""Written beside the numbers by our own training, so that nobody has to infer."""


@dataclass(frozen=True, slots=True)
class AuxLayers:
    """Layers of the target passed, ascending, and how that was known."""

    layers: tuple[int, ...]
    convention: str
    reason: str


def default_layers(num_layers: int) -> tuple[int, int, int]:
    """Return what EAGLE-3 reads of a target when nothing is said, as layers passed."""
    return 2, num_layers // 2, num_layers - 3


def aux_layers(fields: Fields, num_layers: int, override: Sequence[int] | None = None) -> AuxLayers:
    """Return the layers that a head reads of a target of `num_layers` layers.

    `fields` holds the numbers and perhaps their convention. `override` are layers passed.
    ModelError names numbers outside the target; InvalidRequest an override that is.
    """
    if override is not None:
        try:
            layers = _checked(fields, tuple(override), num_layers)
        except ModelError:
            raise InvalidRequest(
                f"must be layers passed, ascending from 0 to {num_layers}, got {list(override)}",
                "aux_layer_ids",
            ) from None
        return AuxLayers(layers, LAYERS_PASSED, "aux_layer_ids was given")
    ids = _ids(fields)
    if ids is None:
        layers = _checked(fields, default_layers(num_layers), num_layers)
        return AuxLayers(layers, LAYERS_PASSED, "the file names none, so EAGLE-3's own are read")
    convention, reason = _convention(fields, ids, num_layers)
    layers = ids if convention == LAYERS_PASSED else tuple(layer + 1 for layer in ids)
    return AuxLayers(_checked(fields, layers, num_layers), convention, reason)


def _convention(fields: Fields, ids: tuple[int, ...], num_layers: int) -> tuple[Convention, str]:
    written = fields.optional_text(CONVENTION_FIELD)
    if written is not None:
        for convention in (LAYERS_PASSED, LAYER_OUTPUTS):
            if written == convention:
                return convention, f"the file's {CONVENTION_FIELD} says so"
        raise fields.fault(
            CONVENTION_FIELD, f"is '{written}'; known are {LAYERS_PASSED}, {LAYER_OUTPUTS}"
        )
    passed = default_layers(num_layers)
    if ids == passed:
        return LAYERS_PASSED, f"they are EAGLE-3's own layers of {num_layers}, counted as passed"
    if ids == tuple(layer - 1 for layer in passed):
        return LAYER_OUTPUTS, f"they are EAGLE-3's own layers of {num_layers}, counted from 0"
    if num_layers in ids:
        return LAYERS_PASSED, f"a target of {num_layers} layers has no layer {num_layers}"
    if ids[:1] == (1,):
        return LAYER_OUTPUTS, "the first is 1, and published heads read the state after 2 layers"
    return LAYERS_PASSED, "nothing says otherwise"


def _ids(fields: Fields) -> tuple[int, ...] | None:
    value = fields.raw(IDS_FIELD)
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise fields.fault(IDS_FIELD, f"must be a list of integers, got {shown(value)}")
    return tuple(value)


def _checked(fields: Fields, layers: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    ascending = all(low < high for low, high in pairwise(layers))
    if not layers or not ascending or layers[0] < 0 or layers[-1] > num_layers:
        raise fields.fault(
            IDS_FIELD,
            f"means the states after {list(layers)} layers; they must ascend from 0 to the "
            f"target's {num_layers}",
        )
    return layers
