"""The environment variables that Twinfire reads: all of them.

Everything else is an option or a file; these only say where this user keeps caches.
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

    @classmethod
    def read(cls, variables: Mapping[str, str] = os.environ) -> Env:
        """Read the variables as they are now; empty ones count as absent."""
        own = variables.get("TWINFIRE_CACHE")
        if own:
            return cls(Path(own).expanduser())
        caches = variables.get("XDG_CACHE_HOME")
        base = Path(caches) if caches else Path.home() / ".cache"
        return cls(base / "twinfire")
