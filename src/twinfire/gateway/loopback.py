"""Which clients are on this host."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether an address is this host's own; False for names and for nothing."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
