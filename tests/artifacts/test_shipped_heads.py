"""The heads that come with the package: small, whole, and for the default model's weights."""

from __future__ import annotations

import logging

import pytest

from support.default_model import default_model_path
from twinfire.artifacts.aliases import DEFAULT_ALIAS
from twinfire.artifacts.checkpoint import open_checkpoint
from twinfire.artifacts.shipped_heads import SHIPPED_FOLDER, resolve_draft_head, shipped_heads

MAX_BYTES = 25 * 1000 * 1000


@pytest.mark.skipif(not shipped_heads(), reason="no head is shipped")
def test_the_default_model_finds_its_head(caplog: pytest.LogCaptureFixture) -> None:
    target = open_checkpoint(default_model_path())
    with caplog.at_level(logging.INFO):
        found = resolve_draft_head(None, target)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "aux_layer_convention says so" in caplog.text
    named = resolve_draft_head(DEFAULT_ALIAS, target)
    assert found.content_key == named.content_key
    assert found.draft_ids is not None
    assert set(target.config.eos_token_ids) <= set(found.draft_ids.tolist())


@pytest.mark.parametrize("name", shipped_heads())
def test_a_shipped_head_is_small(name: str) -> None:
    files = [path for path in (SHIPPED_FOLDER / name).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= MAX_BYTES
