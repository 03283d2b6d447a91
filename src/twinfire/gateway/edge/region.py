"""One region as the edge knows it."""

from __future__ import annotations

from twinfire.gateway.edge.edge_settings import RegionAddress
from twinfire.gateway.health_record import HealthRecord


class Region:
    """A gateway's address, its health and what goes on there for us."""

    def __init__(self, address: RegionAddress) -> None:
        self.name = address.name
        self.url = address.url
        self.health = HealthRecord()
        self.num_running = 0

    @property
    def title(self) -> str:
        """What the log calls it."""
        return f"region {self.name}"
