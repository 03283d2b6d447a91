"""The default model as a file on this machine, fetched on first use as a user would."""

from __future__ import annotations

from pathlib import Path

from twinfire.artifacts.aliases import DEFAULT_ALIAS
from twinfire.artifacts.model_store import resolve_model


def default_model_path() -> Path:
    return resolve_model(DEFAULT_ALIAS).path
