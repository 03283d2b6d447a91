"""How an embedding model pools, as folders in the format of sentence-transformers say it.

`modules.json` lists the stages, `1_Pooling/config.json` says how one of them pools. A stage that
Twinfire does not compute is refused by name.
"""

from __future__ import annotations

import json
from pathlib import Path

from twinfire.artifacts.fields import read_json_fields
from twinfire.protocol.errors import ModelError
from twinfire.protocol.pooling import Pooling

MODULES_FILE = "modules.json"
_POOLING_FILE = "config.json"
_COMPUTED_STAGES = ("Transformer", "Pooling", "Normalize")
_FLAGS: dict[str, Pooling] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
}
_UNSUPPORTED_FLAGS = ("pooling_mode_cls_token", "pooling_mode_max_tokens")


def read_pooling(folder: Path) -> Pooling | None:
    """Return how a folder's model pools, None for a model that generates."""
    stages = _stages(folder)
    path = stages.get("Pooling")
    if path is None:
        return None
    for name in stages:
        if name not in _COMPUTED_STAGES:
            raise ModelError(f"{folder / MODULES_FILE}: the stage `{name}` is not supported")
    config = read_json_fields(folder / path / _POOLING_FILE)
    modes = [name for name in (*_FLAGS, *_UNSUPPORTED_FLAGS) if config.flag(name)]
    if len(modes) != 1 or modes[0] not in _FLAGS:
        known = ", ".join(_FLAGS)
        raise ModelError(f"{config.source}: exactly one of {known} must be true, not {modes}")
    return _FLAGS[modes[0]]


def _stages(folder: Path) -> dict[str, str]:
    """Return the path of every stage by the last part of its type."""
    path = folder / MODULES_FILE
    if not path.exists():
        return {}
    try:
        modules = json.loads(path.read_text())
        return {module["type"].rpartition(".")[2]: module["path"] for module in modules}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
