"""Who may look at a cluster and change it: by host without a key, by the key where there is one."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from support.gateway_server import byte_text_side
from support.scripted_backend import ScriptedBackend
from twinfire.gateway.app import create_app_of_models
from twinfire.gateway.cluster_control import ClusterStatus
from twinfire.gateway.hosted_model import HostedModel
from twinfire.gateway.served_model import ServedModel
from twinfire.gateway.settings import GatewaySettings
from twinfire.protocol.messages import Role

HERE, ELSEWHERE = "127.0.0.1", "10.1.2.3"
ADMIN, CLIENT = "Bearer admin-key", "Bearer client-key"


class RecordedCluster:
    def __init__(self) -> None:
        self.changes: list[object] = []

    def status(self) -> ClusterStatus:
        return ClusterStatus((), 0, 0, {})

    async def scale(self, role: Role, count: int, model: str | None) -> None:
        self.changes.append((role, count, model))

    def set_role(self, worker: str, role: Role) -> None:
        self.changes.append((worker, role))

    def drain(self, worker: str) -> None:
        self.changes.append(worker)


def statuses(
    settings: GatewaySettings, host: str, key: str | None
) -> tuple[int, int, int, list[object]]:
    """The answers to a look, a change and a request for the models, and what was changed."""
    control = RecordedCluster()

    async def main() -> list[int]:
        model = HostedModel.of(ServedModel(("t",), byte_text_side()), ScriptedBackend())
        app = create_app_of_models(settings, [model], control)
        transport = httpx.ASGITransport(app, client=(host, 1234))
        headers = {} if key is None else {"authorization": key}
        async with httpx.AsyncClient(
            transport=transport, base_url="http://gateway", headers=headers
        ) as client:
            answers = [
                await client.get("/cluster/status"),
                await client.post("/cluster/drain", json={"worker": "w"}),
                await client.get("/v1/models"),
            ]
        return [answer.status_code for answer in answers]

    look, change, models = asyncio.run(main())
    return look, change, models, control.changes


@pytest.mark.parametrize(
    ("api_keys", "host", "key", "expected"),
    [
        ((), HERE, None, 200),
        ((), ELSEWHERE, None, 404),
        ((), "", None, 404),
        (("client-key",), HERE, None, 401),
        (("client-key",), HERE, CLIENT, 200),
        (("client-key",), ELSEWHERE, CLIENT, 404),
    ],
)
def test_without_an_administrators_key_the_host_decides(
    api_keys: tuple[str, ...], host: str, key: str | None, expected: int
) -> None:
    look, change, _, changes = statuses(GatewaySettings(api_keys=api_keys), host, key)
    assert (look, change) == (expected, expected)
    assert changes == (["w"] if expected == 200 else [])


@pytest.mark.parametrize("host", [HERE, ELSEWHERE])
@pytest.mark.parametrize(
    ("key", "expected"),
    [(ADMIN, 200), (None, 401), (CLIENT, 401), ("Bearer admin-ke", 401), ("Basic admin-key", 401)],
)
def test_an_administrators_key_opens_it_to_every_host_and_nothing_else(
    host: str, key: str | None, expected: int
) -> None:
    settings = GatewaySettings(api_keys=("client-key",), admin_key="admin-key")
    look, change, models, changes = statuses(settings, host, key)
    assert (look, change) == (expected, expected)
    assert changes == (["w"] if expected == 200 else [])
    # It is no client's key.
    assert models == (200 if key == CLIENT else 401)
