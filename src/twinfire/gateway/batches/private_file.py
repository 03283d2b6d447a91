"""A database for one life of a gateway, where the operator gives none."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path


def private_database_file() -> str:
    """Return the path of a file that does not exist, removed at the process's end."""
    folder = tempfile.mkdtemp(prefix="twinfire-state-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return str(Path(folder) / "state.sqlite")
