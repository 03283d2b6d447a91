from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from support.chaos_cell import ChaosCell
from support.chaos_site import MODEL, Site, Transport
from support.serve_process import serve_process
from support.tiny_text_model import write_text_model

CHAOS_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 8192,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
}
"""Much to compute beside few KV bytes, so that reading a prefix pays at any load."""
CELL_LIMIT_S = 90.0
RunCell = Callable[[Transport, Callable[[ChaosCell], Awaitable[None]]], None]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / MODEL
    write_text_model(folder, **CHAOS_SIZES)
    return folder


@pytest.fixture(scope="session")
def reference_url(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("reference")
    with serve_process(folder, str(tiny_model), "--kv-cache-memory", "8MiB") as server:
        yield server.url


class Sites:
    """One site per transport, made anew after a cell that failed."""

    def __init__(self, factory: pytest.TempPathFactory, model: Path, reference_url: str) -> None:
        self._factory = factory
        self._model = model
        self._reference_url = reference_url
        self._cells: dict[Transport, ChaosCell] = {}

    def run(self, transport: Transport, steps: Callable[[ChaosCell], Awaitable[None]]) -> None:
        if transport == "nixl":
            pytest.importorskip("nixl_cu12", reason="NIXL is not installed (extra `nixl`)")
        cell = self._cells.get(transport)
        if cell is None:
            site = Site(self._factory.mktemp("s"), self._model, transport)
            cell = self._cells[transport] = ChaosCell(site, self._reference_url)

        async def scenario() -> None:
            async with asyncio.timeout(CELL_LIMIT_S), cell.site.clients():
                await steps(cell)

        try:
            asyncio.run(scenario())
        except BaseException:
            print(cell.site.logs())
            del self._cells[transport]
            cell.site.close()
            raise

    def close(self) -> None:
        for cell in self._cells.values():
            cell.site.close()


@pytest.fixture(scope="session")
def run_cell(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, reference_url: str
) -> Iterator[RunCell]:
    sites = Sites(tmp_path_factory, tiny_model, reference_url)
    yield sites.run
    sites.close()
