"""What a worker that is to speculate does where it cannot, or not as it was told."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from support.checkpoint_files import write_model_folder
from twinfire.artifacts.checkpoint import Checkpoint, open_checkpoint
from twinfire.protocol.errors import ModelError
from twinfire.protocol.speculation import parse_speculation
from twinfire.worker.speculation import open_head


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    write_model_folder(tmp_path)
    return open_checkpoint(tmp_path)


def test_hybrid_without_a_shipped_head_says_that_it_goes_on_without(
    checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert open_head(parse_speculation("hybrid"), checkpoint) is None
    assert "hybrid drafts as suffix does" in caplog.text


@pytest.mark.parametrize("speculate", ["eagle3", "eagle3:head=gone", "hybrid:head=gone"])
def test_a_head_that_was_asked_for_must_be_there(checkpoint: Checkpoint, speculate: str) -> None:
    with pytest.raises(ModelError, match="draft head"):
        open_head(parse_speculation(speculate), checkpoint)


@pytest.mark.parametrize("speculate", ["off", "ngram", "suffix"])
def test_other_methods_want_no_head(checkpoint: Checkpoint, speculate: str) -> None:
    assert open_head(parse_speculation(speculate), checkpoint) is None


def test_a_model_that_embeds_has_nothing_to_draft(tmp_path: Path) -> None:
    write_model_folder(tmp_path)
    steps = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "pool", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "", "type": "sentence_transformers.models.Normalize"},
    ]
    (tmp_path / "modules.json").write_text(json.dumps(steps))
    (tmp_path / "pool").mkdir()
    (tmp_path / "pool" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.pooling == "last"
    with pytest.raises(ModelError, match="embeds texts"):
        open_head(parse_speculation("suffix"), checkpoint)
    assert open_head(parse_speculation("off"), checkpoint) is None
