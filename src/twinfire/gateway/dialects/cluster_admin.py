"""`/cluster/...`: looking at the workers behind the gateway and changing them.

With an administrator's key whoever shows it is answered; without one only clients on this host
are, with the key that other routes need.
"""

from __future__ import annotations

import msgspec

from twinfire.gateway.cluster_control import ClusterControl
from twinfire.gateway.dialects.json_body import decode_body
from twinfire.gateway.errors import HttpError
from twinfire.gateway.exchange import Exchange
from twinfire.gateway.loopback import is_loopback
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

    def __init__(self, control: ClusterControl, *, is_remote: bool = False) -> None:
        """With `is_remote` clients on other hosts, whose key somebody else checks, are answered."""
        self._control = control
        self._is_remote = is_remote
        self._scale = msgspec.json.Decoder(ScaleRequest)
        self._role = msgspec.json.Decoder(RoleRequest)
        self._drain = msgspec.json.Decoder(DrainRequest)

    async def status(self, exchange: Exchange) -> None:
        """`GET /cluster/status`."""
        await self._answer(exchange)

    async def scale(self, exchange: Exchange) -> None:
        """`POST /cluster/scale`: answers once the workers that go have gone."""
        self._check_host(exchange)
        request = decode_body(exchange.body, self._scale)
        await self._control.scale(request.role, request.count, request.model)
        await self._answer(exchange)

    async def role(self, exchange: Exchange) -> None:
        """`POST /cluster/role`."""
        self._check_host(exchange)
        request = decode_body(exchange.body, self._role)
        self._control.set_role(request.worker, request.role)
        await self._answer(exchange)

    async def drain(self, exchange: Exchange) -> None:
        """`POST /cluster/drain`."""
        self._check_host(exchange)
        request = decode_body(exchange.body, self._drain)
        self._control.drain(request.worker)
        await self._answer(exchange)

    async def _answer(self, exchange: Exchange) -> None:
        self._check_host(exchange)
        await exchange.answer(msgspec.json.encode(self._control.status()))

    def _check_host(self, exchange: Exchange) -> None:
        if not self._is_remote and not is_loopback(exchange.client_host):
            raise HttpError(404, "There is nothing at this address for clients on other hosts.")
