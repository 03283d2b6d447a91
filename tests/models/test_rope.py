"""Rotary frequencies against transformers' own."""

from __future__ import annotations

import numpy as np
import pytest

from support.tiny_models import TinyModel, tiny_model
from twinfire.artifacts.model_config import RopeConfig
from twinfire.models.rope import rope_table
from twinfire.protocol.errors import ModelError


@pytest.mark.parametrize(
    "name", ["llama", "llama_rope_llama3", "llama_rope_linear", "llama_rope_yarn"]
)
def test_frequencies_equal_transformers(name: str) -> None:
    model: TinyModel = tiny_model(name)
    theirs = model.reference.model.rotary_emb
    table = rope_table(model.config.rope, model.config.head_dim)
    np.testing.assert_allclose(table.inv_freq, theirs.inv_freq.numpy(), rtol=3e-7)
    assert table.attention_factor == pytest.approx(theirs.attention_scaling, rel=1e-7)


def test_odd_heads_and_missing_windows_are_refused() -> None:
    with pytest.raises(ModelError, match="head_dim 7"):
        rope_table(RopeConfig(), 7)
    for kind in ("llama3", "yarn"):
        with pytest.raises(ModelError, match="original_max_position"):
            rope_table(RopeConfig(kind=kind, factor=2.0), 8)  # type: ignore[arg-type]
