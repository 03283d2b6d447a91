"""What a cluster's pools count, as Prometheus metrics of one model.

Nothing is kept here: everything is read from the backend when somebody scrapes. Only workers that
are there have series, so labels stay few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from twinfire.gateway.backends.cluster_backend import ClusterBackend
from twinfire.gateway.metrics import PREFIX
from twinfire.protocol.messages import Load, WorkerInfo

_WORKER_GAUGES: tuple[tuple[str, str, Callable[[Load], float]], ...] = (
    ("worker_requests_running", "Requests in the batch", lambda load: load.running),
    ("worker_requests_waiting", "Requests that wait", lambda load: load.waiting),
    (
        "worker_prefill_tokens_waiting",
        "Prompt tokens to be computed, by the worker's report",
        lambda load: load.prefill_tokens_waiting,
    ),
    ("worker_kv_blocks_used", "KV blocks in use", lambda load: load.kv_blocks_used),
    (
        "worker_kv_blocks_held",
        "Of these, blocks kept for other workers",
        lambda load: load.kv_blocks_held,
    ),
    ("worker_kv_blocks", "KV blocks there are", lambda load: load.kv_blocks_total),
    ("worker_hand_offs_open", "Hand-offs and leases open", lambda load: load.hand_offs_open),
)


class ClusterMetrics(Collector):
    """A collector to include into a model's `Metrics`."""

    def __init__(
        self, model_name: str, backend: ClusterBackend, name_of: Callable[[WorkerInfo], str]
    ) -> None:
        """`name_of` says what a worker is called."""
        self._model_name = model_name
        self._backend = backend
        self._name_of = name_of

    def describe(self) -> Iterable[Metric]:
        """Say nothing in advance: values are there only once workers are."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield everything as it is now."""
        yield from self._decisions()
        yield from self._hand_offs()
        yield from self._queue()
        yield from self._workers()
        yield from self._ledgers()

    def _decisions(self) -> Iterator[Metric]:
        routing, flow = self._backend.router.tallies, self._backend.tallies
        yield self._counts(
            "route_decisions", "Routes by their reason", "reason", routing.reasons.items()
        )
        yield self._count("route_busy", "Times that no worker could take more", routing.num_busy)
        yield self._counts(
            "prefix_prediction_tokens",
            "Cached prompt tokens: as the index promised and as it was",
            "kind",
            (
                ("predicted", routing.predicted_cached_tokens),
                ("true", routing.true_cached_tokens),
                ("overestimated", routing.overestimated_tokens),
                ("underestimated", routing.underestimated_tokens),
            ),
        )
        yield self._count("request_attempts", "Tries of requests on workers", flow.num_attempts)
        yield self._counts(
            "request_attempt_failures",
            "Tries that failed, by reason",
            "reason",
            flow.failures.items(),
        )
        yield self._count(
            "request_resumes", "Choices that went on after their worker was lost", flow.num_resumes
        )

    def _hand_offs(self) -> Iterator[Metric]:
        flow = self._backend.tallies
        yield self._count("hand_offs", "Prompts that changed workers", flow.num_hand_offs)
        yield self._count(
            "preempted_hand_overs", "Choices handed over after preemption", flow.num_hand_overs
        )
        yield self._count("transfer_blocks", "KV blocks moved by hand-offs", flow.moved_blocks)
        yield self._count("transfer_bytes", "Bytes moved by hand-offs", flow.moved_bytes)
        yield self._count(
            "transfer_seconds", "What moving added to requests, in all", flow.transfer_s
        )
        yield self._count(
            "pulled_tokens", "Prompt tokens read from other workers' caches", flow.pulled_tokens
        )

    def _queue(self) -> Iterator[Metric]:
        queue = self._backend.admission
        for name, text, value in (
            ("gateway_queue_requests", "Requests waiting for a worker", len(queue)),
            ("gateway_queue_tokens", "Their tokens", queue.num_tokens),
        ):
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=("model_name",))
            gauge.add_metric((self._model_name,), value)
            yield gauge

    def _workers(self) -> Iterator[Metric]:
        members = [(one.info, one.load) for one in self._backend.registry if one.load is not None]
        for name, text, value_of in _WORKER_GAUGES:
            gauge = self._worker_gauge(name, text)
            for info, load in members:
                gauge.add_metric(self._worker_labels(info), value_of(load))
            yield gauge

    def _ledgers(self) -> Iterator[Metric]:
        prefill = self._worker_gauge(
            "ledger_prefill_tokens", "Prompt tokens to be computed, as the gateway reckons"
        )
        decode = self._worker_gauge(
            "ledger_kv_blocks", "KV blocks in use or expected, as the gateway reckons"
        )
        for state in self._backend.router.workers():
            labels = self._worker_labels(state.info)
            prefill.add_metric(labels, state.prefill.load)
            decode.add_metric(labels, state.decode.load)
        yield prefill
        yield decode

    def _worker_gauge(self, name: str, text: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(PREFIX + name, text, labels=("model_name", "worker", "role"))

    def _worker_labels(self, info: WorkerInfo) -> tuple[str, str, str]:
        return (self._model_name, self._name_of(info), info.role)

    def _count(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=("model_name",))
        family.add_metric((self._model_name,), value)
        return family

    def _counts(
        self, name: str, text: str, label: str, values: Iterable[tuple[str, float]]
    ) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=("model_name", label))
        for key, value in values:
            family.add_metric((self._model_name, key), value)
        return family
