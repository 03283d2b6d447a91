"""The design's import rules, read from the sources, and what a process really loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import twinfire

ROOMS = [
    "protocol",
    "artifacts",
    "cache",
    "scheduler",
    "kernels",
    "models",
    "engine",
    "transfer",
    "worker",
    "training",
    "accounts",
    "gateway",
    "cluster",
    "bench",
    "cli",
]
"""Lowest first: a room may import itself and the rooms before it."""

FORBIDDEN = {
    "gateway": {"kernels", "models", "engine", "transfer", "worker", "training"},
    "accounts": set(ROOMS) - {"accounts", "protocol"},
    "bench": set(ROOMS) - {"bench", "protocol"},
}
TORCH_PLACES = {"kernels/torch", "engine/torch_", "training"}
SOURCE = Path(twinfire.__file__).parent
FILES = sorted(path for path in SOURCE.rglob("*.py") if path.parent != SOURCE)


def imported_modules(path: Path) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


def test_every_folder_is_a_known_room() -> None:
    # A folder of data has no code and is no room.
    found = {path.parent.name for path in SOURCE.glob("*/*.py")}
    assert found == set(ROOMS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_room_imports_only_rooms_below_it(path: Path) -> None:
    room = path.relative_to(SOURCE).parts[0]
    allowed = set(ROOMS[: ROOMS.index(room) + 1]) - FORBIDDEN.get(room, set())
    for module in imported_modules(path):
        if module.startswith("twinfire."):
            target = module.split(".")[1]
            if target in ROOMS:
                assert target in allowed, f"{room} must not import {module}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_torch_is_imported_only_where_it_computes(path: Path) -> None:
    relative = str(path.relative_to(SOURCE))
    if any(relative.startswith(place) for place in TORCH_PLACES):
        return
    torch_modules = {name for name in imported_modules(path) if name.split(".")[0] == "torch"}
    assert not torch_modules, f"{relative} imports torch"


@pytest.mark.parametrize(
    "module",
    [
        "twinfire.gateway.app",
        "twinfire.gateway.server",
        "twinfire.gateway.backends.local_worker",
        "twinfire.scheduler.scheduler",
        "twinfire.cache.prefix_cache",
        "twinfire.artifacts.checkpoint",
        "twinfire.worker.worker",
        "twinfire.cli.main",
    ],
)
def test_loading_these_never_loads_torch(module: str) -> None:
    program = f"import sys, {module}; assert 'torch' not in sys.modules, 'torch was loaded'"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
