"""The environment variables that Twinfire reads: all of them.

Everything else is an option or a file; these only say where this user keeps caches and data.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Env:
    """What the environment says."""

    cache_dir: Path
    """`TWINFIRE_CACHE`, else `XDG_CACHE_HOME`/twinfire, else ~/.cache/twinfire."""
    data_dir: Path
    """`TWINFIRE_DATA`, else `XDG_DATA_HOME`/twinfire, else ~/.local/share/twinfire."""

    @classmethod
    def read(cls, variables: Mapping[str, str] = os.environ) -> Env:
        """Read the variables as they are now; empty ones count as absent."""

        def folder(own: str, base: str, default: str) -> Path:
            if variables.get(own):
                return Path(variables[own]).expanduser()
            parent = variables.get(base)
            return (Path(parent) if parent else Path.home() / default) / "twinfire"

        return cls(
            cache_dir=folder("TWINFIRE_CACHE", "XDG_CACHE_HOME", ".cache"),
            data_dir=folder("TWINFIRE_DATA", "XDG_DATA_HOME", ".local/share"),
        )
