"""Addresses of links, as text: `unix:/path/of/socket` or `tcp:host:port` (`tcp:[::1]:port`)."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from twinfire.protocol.errors import InvalidRequest

_MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A socket file on this host."""

    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A port; 0 lets the system choose when listening."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether only this host can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp:{host}:{self.port}"


Address = UnixAddress | TcpAddress


def parse_address(text: str) -> Address:
    """Return the address that `text` names; InvalidRequest says what is wrong with it."""
    kind, _, rest = text.partition(":")
    if kind == "unix" and rest:
        return UnixAddress(rest)
    host, _, port = rest.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if kind == "tcp" and host and port.isdecimal() and int(port) <= _MAX_PORT:
        return TcpAddress(host, int(port))
    raise InvalidRequest(f"{text!r} is no address; write unix:/path or tcp:host:port")
