"""`/cluster/...`: looking at the workers behind the gateway and changing them.

Answers only clients on this host, beside the key that other routes need.
"""

from __future__ import annotations

import ipaddress

import msgspec

from twinfire.gateway.cluster_control import ClusterControl
from twinfire.gateway.dialects.json_body import decode_body
from twinfire.gateway.errors import HttpError
from twinfire.gateway.exchange import Exchange
from twinfire.protocol.messages import Role


class ScaleRequest(msgspec.Struct, forbid_unknown_fields=True):
    """How many supervised workers of a role there shall be."""

    role: Role
    count: int
    model: str | None = None
    """May be left out where there is one."""


class RoleRequest(msgspec.Struct, forbid_unknown_fields=True):
    """What a worker shall do from now on."""

    worker: str
    role: Role


class DrainRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Which worker shall end."""

    worker: str


class ClusterAdmin:
    """The handlers, one method each."""

    def __init__(self, control: ClusterControl) -> None:
        self._control = control
        self._scale = msgspec.json.Decoder(ScaleRequest)
        self._role = msgspec.json.Decoder(RoleRequest)
        self._drain = msgspec.json.Decoder(DrainRequest)

    async def status(self, exchange: Exchange) -> None:
        """`GET /cluster/status`."""
        await self._answer(exchange)

    async def scale(self, exchange: Exchange) -> None:
        """`POST /cluster/scale`: answers once the workers that go have gone."""
        _check_local(exchange)
        request = decode_body(exchange.body, self._scale)
        await self._control.scale(request.role, request.count, request.model)
        await self._answer(exchange)

    async def role(self, exchange: Exchange) -> None:
        """`POST /cluster/role`."""
        _check_local(exchange)
        request = decode_body(exchange.body, self._role)
        self._control.set_role(request.worker, request.role)
        await self._answer(exchange)

    async def drain(self, exchange: Exchange) -> None:
        """`POST /cluster/drain`."""
        _check_local(exchange)
        request = decode_body(exchange.body, self._drain)
        self._control.drain(request.worker)
        await self._answer(exchange)

    async def _answer(self, exchange: Exchange) -> None:
        _check_local(exchange)
        await exchange.answer(msgspec.json.encode(self._control.status()))


def _check_local(exchange: Exchange) -> None:
    try:
        local = ipaddress.ip_address(exchange.client_host).is_loopback
    except ValueError:
        local = False
    if not local:
        raise HttpError(404, "There is nothing at this address for clients on other hosts.")
