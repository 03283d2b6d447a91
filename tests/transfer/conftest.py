from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.array_memory import ArrayMemory
from support.connector_ends import LOOPBACK, End, MakeEnd, unix_address
from twinfire.protocol.addresses import Address
from twinfire.protocol.worker_config import ConnectorKind


@pytest.fixture(params=["socket", "nixl"])
def kind(request: pytest.FixtureRequest) -> ConnectorKind:
    if request.param == "nixl":
        pytest.importorskip("nixl_cu12", reason="NIXL is not installed (extra `nixl`)")
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(params=["unix", "tcp"])
def listen(request: pytest.FixtureRequest, tmp_path: Path) -> Address:
    """Where the serving end listens."""
    return LOOPBACK if request.param == "tcp" else unix_address(tmp_path, "there")


@pytest.fixture
def make_end(kind: ConnectorKind) -> Iterator[MakeEnd]:
    """Makes ends of the connector under test, which are closed with the test."""
    with ExitStack() as stack:

        def make(memory: ArrayMemory, listen: Address = LOOPBACK, **options: object) -> End:
            end = End(kind, memory, listen, **options)  # type: ignore[arg-type]
            stack.callback(end.connector.close)
            return end

        yield make
