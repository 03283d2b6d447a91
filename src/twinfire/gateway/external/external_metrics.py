"""What is counted of one external model and of each of its engines, as Prometheus metrics.

States and counts are read when somebody scrapes; times have the names that our own models' have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from twinfire.gateway.external.engine_server import EngineServer
from twinfire.gateway.metrics import LATENCY_BUCKETS_S, PREFIX, TTFT_BUCKETS_S

if TYPE_CHECKING:
    from twinfire.gateway.external.pair import ExternalTallies

_ENGINE_GAUGES: tuple[tuple[str, str, Callable[[EngineServer], float]], ...] = (
    (
        "external_engine_healthy",
        "1 while its checks pass",
        lambda one: one.health.is_healthy,
    ),
    (
        "external_engine_breaker_open",
        "1 while it is kept from requests that it would break",
        lambda one: one.breaker.is_open,
    ),
    (
        "external_engine_requests_running",
        "Requests of ours that it works on",
        lambda one: one.ledger.num_entries,
    ),
    ("external_engine_tokens", "Their tokens, estimated", lambda one: one.ledger.load),
)
_MODEL_COUNTS: tuple[tuple[str, str, Callable[[ExternalTallies], int]], ...] = (
    ("external_requests", "Requests for the model", lambda tallies: tallies.requests),
    (
        "external_hand_offs",
        "Answers whose prompt another engine computed",
        lambda tallies: tallies.split,
    ),
    (
        "external_retries",
        "Attempts that were followed by another one",
        lambda tallies: tallies.retries,
    ),
    (
        "external_released_prompts",
        "Held prompts that nobody wanted any more and that were given back",
        lambda tallies: tallies.released,
    ),
    (
        "external_broken_streams",
        "Answers that ended with an error after their first byte",
        lambda tallies: tallies.broken_streams,
    ),
    (
        "external_clients_left",
        "Clients that did not wait for the end",
        lambda tallies: tallies.left,
    ),
)


class ExternalMetrics(Collector):
    """All metrics of one external model. Belongs to the event loop's thread."""

    def __init__(
        self, model_name: str, servers: Sequence[EngineServer], tallies: ExternalTallies
    ) -> None:
        self._model_name = model_name
        self._servers = servers
        self._tallies = tallies
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token", TTFT_BUCKETS_S
        )
        self._e2e = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the last token", LATENCY_BUCKETS_S
        )

    def began(self, seconds: float) -> None:
        """The first event of a stream went out so long after its request came."""
        self._ttft.observe(seconds)

    def answered(self, seconds: float) -> None:
        """An answer was complete so long after its request came."""
        self._e2e.observe(seconds)

    def render(self) -> bytes:
        """Return the text exposition of everything."""
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        """Say nothing in advance."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield everything as it is now."""
        labels = ("model_name", "engine", "stage")
        for name, text, value_of in _ENGINE_GAUGES:
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=labels)
            for server in self._servers:
                gauge.add_metric(self._labels(server), value_of(server))
            yield gauge
        requests = CounterMetricFamily(
            PREFIX + "external_engine_requests", "Requests sent to an engine", labels=labels
        )
        failures = CounterMetricFamily(
            PREFIX + "external_engine_failures",
            "Of these, those without a good answer, by the kind of fault",
            labels=(*labels, "reason"),
        )
        for server in self._servers:
            requests.add_metric(self._labels(server), server.num_requests)
            for reason, count in server.failures.items():
                failures.add_metric((*self._labels(server), reason), count)
        yield requests
        yield failures
        for name, text, count_of in _MODEL_COUNTS:
            counter = CounterMetricFamily(PREFIX + name, text, labels=("model_name",))
            counter.add_metric((self._model_name,), count_of(self._tallies))
            yield counter

    def _labels(self, server: EngineServer) -> tuple[str, str, str]:
        return (self._model_name, server.url, server.stage)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(
            PREFIX + name, text, ("model_name",), buckets=buckets, registry=self._registry
        )
        return histogram.labels(self._model_name)
