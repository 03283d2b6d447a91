from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI

from support.gateway_server import RunningGateway, running_gateway
from support.scripted_backend import ScriptedBackend


@pytest.fixture(scope="session")
def shared_gateway() -> Iterator[RunningGateway]:
    with running_gateway() as gateway:
        yield gateway


@pytest.fixture
def gateway(shared_gateway: RunningGateway) -> Iterator[RunningGateway]:
    """A running server with its backend's knobs in their first position."""
    yield shared_gateway

    async def reset() -> None:
        backend = shared_gateway.backend
        backend.released.set()
        await backend.idle.wait()
        fresh = ScriptedBackend()
        fields = set(vars(fresh)) - {"_tasks", "num_running", "idle"}
        for name in fields:
            setattr(backend, name, getattr(fresh, name))

    shared_gateway.run(reset())


@pytest.fixture
def client(gateway: RunningGateway) -> Iterator[OpenAI]:
    with OpenAI(base_url=gateway.url + "/v1", api_key="none", max_retries=0) as client:
        yield client
