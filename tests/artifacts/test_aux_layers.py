"""Numbers of published heads, and what they are taken to mean."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinfire.artifacts.aux_layers import (
    CONVENTION_FIELD,
    IDS_FIELD,
    LAYER_OUTPUTS,
    LAYERS_PASSED,
    aux_layers,
    default_layers,
)
from twinfire.artifacts.fields import Fields
from twinfire.protocol.errors import ModelError


def read(ids: object, num_layers: int, convention: str | None = None) -> tuple[str, list[int]]:
    fields = Fields({IDS_FIELD: ids, CONVENTION_FIELD: convention}, "config.json")
    found = aux_layers(fields, num_layers)
    return found.convention, list(found.layers)


@pytest.mark.parametrize(
    ("ids", "num_layers", "convention", "layers"),
    [
        # lightseekorg/kimi-k2.5-eagle3-mla and AQ-MedAI/Kimi-K25-eagle3, then the card of
        # lightseekorg/kimi-k2.6-eagle3.1-mla: the same tensors.
        ([2, 30, 58], 61, LAYERS_PASSED, [2, 30, 58]),
        ([1, 29, 57], 61, LAYER_OUTPUTS, [2, 30, 58]),
        # SpecForge's Qwen3-235B-A22B and ModelOpt's default for 36 layers.
        ([1, 46, 90], 94, LAYER_OUTPUTS, [2, 47, 91]),
        ([1, 17, 32], 36, LAYER_OUTPUTS, [2, 18, 33]),
        # gpt-oss of sglang#32334: only as layers passed does 36 exist.
        ([24, 30, 36], 36, LAYERS_PASSED, [24, 30, 36]),
        ([1, 10, 20], 36, LAYER_OUTPUTS, [2, 11, 21]),
        ([0, 5, 9], 36, LAYERS_PASSED, [0, 5, 9]),
        (None, 32, LAYERS_PASSED, [2, 16, 29]),
        ([], 32, LAYERS_PASSED, [2, 16, 29]),
    ],
)
def test_the_convention_is_inferred(
    ids: object, num_layers: int, convention: str, layers: list[int]
) -> None:
    assert read(ids, num_layers) == (convention, layers)


@given(st.integers(8, 200))
def test_both_ways_to_say_the_default_are_the_same(num_layers: int) -> None:
    passed = default_layers(num_layers)
    assert read(list(passed), num_layers)[1] == list(passed)
    assert read([layer - 1 for layer in passed], num_layers)[1] == list(passed)


def test_a_written_convention_wins() -> None:
    assert read([1, 2, 3], 4, LAYERS_PASSED) == (LAYERS_PASSED, [1, 2, 3])
    assert read([2, 30, 58], 61, LAYER_OUTPUTS) == (LAYER_OUTPUTS, [3, 31, 59])
    with pytest.raises(ModelError, match="is 'upside_down'; known are layers_passed"):
        read([1, 2, 3], 4, "upside_down")


@pytest.mark.parametrize(
    "ids", [[3, 2, 5], [2, 2, 5], [-1, 3, 5], [2, 8, 33], "2,3", [1.0], [True]]
)
def test_impossible_numbers_are_refused(ids: object) -> None:
    with pytest.raises(ModelError, match=IDS_FIELD):
        read(ids, 32)
