"""Prometheus metrics of an edge."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from twinfire.gateway.edge.region import Region


class EdgeMetrics:
    """Owns its registry."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._answers = Counter(
            "twinfire:edge_answers",
            "Answers passed on, by region and status.",
            ["region", "status"],
            registry=self._registry,
        )
        self._passed_over = Counter(
            "twinfire:edge_regions_passed_over",
            "Requests that went to another region than the next in their order.",
            ["region", "reason"],
            registry=self._registry,
        )
        self._failures = Counter(
            "twinfire:edge_failures",
            "Requests that the edge itself ended, by reason.",
            ["reason"],
            registry=self._registry,
        )
        self._bytes = Counter(
            "twinfire:edge_answer_bytes",
            "Body bytes passed on.",
            ["region"],
            registry=self._registry,
        )
        self._healthy = Gauge(
            "twinfire:edge_region_healthy",
            "1 where requests may go.",
            ["region"],
            registry=self._registry,
        )
        self._running = Gauge(
            "twinfire:edge_requests_running", "Under way.", ["region"], registry=self._registry
        )

    def answered(self, region: Region, status: int, num_bytes: int) -> None:
        """An answer was passed on to its end."""
        self._answers.labels(region.name, str(status)).inc()
        self._bytes.labels(region.name).inc(num_bytes)

    def passed_over(self, region: Region, reason: str) -> None:
        """A region could not take a request that was its own."""
        self._passed_over.labels(region.name, reason).inc()

    def failed(self, reason: str) -> None:
        """A request ended here."""
        self._failures.labels(reason).inc()

    def render(self, regions: Iterable[Region]) -> bytes:
        """Return the text exposition."""
        for region in regions:
            self._healthy.labels(region.name).set(region.health.is_healthy)
            self._running.labels(region.name).set(region.num_running)
        return generate_latest(self._registry)
