"""Prometheus metrics of one served model, under the names that the field's dashboards know.

Fed by workers' load reports and by the requests themselves. Owns its registry: two gateways in one
process never share a counter.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from twinfire.gateway.draft_counters import DraftCounters
from twinfire.gateway.tallies import HistogramTally
from twinfire.protocol.messages import Load, WorkerInfo
from twinfire.protocol.startup_stages import Stage

PREFIX = "twinfire:"
VLLM_PREFIX = "vllm:"
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_ITL_BUCKETS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
LATENCY_BUCKETS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_ITERATION_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_CHOICES_BUCKETS = (1, 2, 5, 10, 20, 50, 100)
_MAX_TOKEN_BUCKET = 1_000_000
FirstTokenPart = Literal[
    "request",
    "gateway_queue",
    "lost",
    "prefill_queue",
    "prefill",
    "transfer",
    "decode_queue",
    "first_decode",
]
"""`request` is reading and tokenising; the others are those of `FirstTokenTimes`."""
_NO_LOAD = Load(0, 0, 0, 0, 0, 0, 0, 0, 0)


class Metrics:
    """All metrics of one model. Every method belongs to the event loop's thread.

    What happens at each step or token is only noted; `render` makes metrics of it.
    """

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._model_name = model_name
        self._loads: dict[str, Load] = {}
        """The last report of each worker."""
        self._rendered_loads: dict[str, Load] = {}
        """What of these workers' lives the counters hold."""
        self.num_generated_tokens = 0
        """Output tokens served, of all requests."""
        self._finished: dict[str, Counter] = {}
        self.startup_stages: tuple[Stage, ...] = ()
        """Of this gateway."""
        self._define_of_worker()
        self._define_counts()
        self._define_times()
        self._define_sizes()

    def _define_of_worker(self) -> None:
        self.num_running = self._gauge("num_requests_running", "Requests in the running batch")
        self.num_waiting = self._gauge("num_requests_waiting", "Requests waiting to run")
        self.kv_usage = self._gauge("kv_cache_usage_perc", "KV blocks in use, 1 is all of them")
        self.prefix_queries = self._counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache"
        )
        self.prefix_hits = self._counter(
            "prefix_cache_hits", "Prompt tokens found in the prefix cache"
        )
        self._drafts = DraftCounters(PREFIX, self._model_name, self._registry)
        self.preemptions = self._counter("num_preemptions", "Preemptions by the scheduler")
        self.iteration_tokens = self._tally(
            "iteration_tokens_total", "Tokens computed in an engine step", _ITERATION_BUCKETS
        )

    def _define_counts(self) -> None:
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens served")
        self.prompt_tokens_cached = self._counter(
            "prompt_tokens_cached", "Prompt tokens that came from the prefix cache"
        )
        self._generation_tokens = self._counter("generation_tokens", "Output tokens served")
        self._num_rendered_tokens = 0
        self.rejections = self._counter("admission_rejections", "Requests refused as too many")
        self._success = Counter(
            PREFIX + "request_success",
            "Choices that finished",
            ("model_name", "finished_reason"),
            registry=self._registry,
        )

    def _define_times(self) -> None:
        self.ttft = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token", TTFT_BUCKETS_S
        )
        self._ttft_parts = Histogram(
            PREFIX + "time_to_first_token_part_seconds",
            "Parts of the time to the first token, which add up to it",
            ("model_name", "part"),
            buckets=TTFT_BUCKETS_S,
            registry=self._registry,
        )
        self.inter_token = self._tally(
            "inter_token_latency_seconds", "Between two tokens of a choice", _ITL_BUCKETS_S
        )
        self.time_per_output_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean of a choice", _ITL_BUCKETS_S
        )
        self.e2e = self._latency("e2e_request_latency_seconds", "From arrival to the last token")
        self.queue = self._latency("request_queue_time_seconds", "Waiting in the worker")
        self.prefill = self._latency("request_prefill_time_seconds", "Computing the prompt")
        self.decode = self._latency("request_decode_time_seconds", "From first to last token")
        self.inference = self._latency("request_inference_time_seconds", "Prefill and decode")

    def _define_sizes(self) -> None:
        tokens = _one_two_five(_MAX_TOKEN_BUCKET)
        self.request_prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a request", tokens
        )
        self.request_computed_tokens = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens that were computed", tokens
        )
        self.request_generation_tokens = self._histogram(
            "request_generation_tokens", "Output tokens of a choice", tokens
        )
        self.request_max_generation_tokens = self._histogram(
            "request_max_num_generation_tokens", "Longest choice of a request", tokens
        )
        self.request_params_n = self._histogram(
            "request_params_n", "The request's n", _CHOICES_BUCKETS
        )
        self.request_params_max_tokens = self._histogram(
            "request_params_max_tokens", "The request's bound on output tokens", tokens
        )

    @property
    def loads(self) -> Mapping[str, Load]:
        """The last report of each worker that is there, by instance id; "" where there is one."""
        return self._loads

    def include(self, collector: Collector) -> None:
        """Render what something else counts, too; its series carry the model's name."""
        self._registry.register(collector)

    def observe_load(self, load: Load, worker: str = "") -> None:
        """Take a worker's report of one engine step."""
        if load.step < self._loads.get(worker, _NO_LOAD).step:
            # Another worker's life, in which its counters start anew.
            self.forget_worker(worker)
        self._loads[worker] = load
        if load.step_tokens:
            self.iteration_tokens.observe(load.step_tokens)

    def forget_worker(self, worker: str) -> None:
        """A worker is gone; what it counted stays counted."""
        self._count_loads()
        self._loads.pop(worker, None)
        self._rendered_loads.pop(worker, None)

    def _count_loads(self) -> None:
        loads = self._loads.values()
        num_blocks = sum(load.kv_blocks_total for load in loads)
        self.num_running.set(sum(load.running for load in loads))
        self.num_waiting.set(sum(load.waiting for load in loads))
        num_used = sum(load.kv_blocks_used for load in loads)
        self.kv_usage.set(num_used / num_blocks if num_blocks else 0)
        for worker, load in self._loads.items():
            counted = self._rendered_loads.get(worker, _NO_LOAD)
            self._rendered_loads[worker] = load
            self.preemptions.inc(max(0, load.preemptions - counted.preemptions))
            self.prefix_queries.inc(max(0, load.prefix_queries - counted.prefix_queries))
            self.prefix_hits.inc(max(0, load.prefix_hits - counted.prefix_hits))
            self._drafts.count(load, counted)

    def _count_tokens(self) -> None:
        self._generation_tokens.inc(self.num_generated_tokens - self._num_rendered_tokens)
        self._num_rendered_tokens = self.num_generated_tokens

    def observe_first_token(self, part: FirstTokenPart, seconds: float) -> None:
        """Observe one part of a request's time to its first token."""
        self._ttft_parts.labels(self._model_name, part).observe(seconds)

    def count_finished(self, reason: str) -> None:
        """Count a choice that ended for `reason`."""
        counter = self._finished.get(reason)
        if counter is None:
            counter = self._success.labels(self._model_name, reason)
            self._finished[reason] = counter
        counter.inc()

    def render(self, worker: WorkerInfo | None, with_vllm_names: bool = False) -> bytes:
        """Return the text exposition of everything."""
        self._count_loads()
        self._count_tokens()
        text = generate_latest(self._registry) + self._cache_config_info(worker)
        text += self._startup(worker)
        if with_vllm_names:
            text += text.replace(PREFIX.encode(), VLLM_PREFIX.encode())
        return text

    def _cache_config_info(self, worker: WorkerInfo | None) -> bytes:
        """The worker's cache as labels: rendered afresh, for the next worker may differ."""
        if worker is None:
            return b""
        registry = CollectorRegistry()
        labels = {
            "block_size": str(worker.block_size),
            "num_gpu_blocks": str(worker.num_kv_blocks),
            "cache_dtype": worker.dtype,
            "model_name": self._model_name,
        }
        name = PREFIX + "cache_config_info"
        gauge = Gauge(name, "The KV cache's sizes", tuple(labels), registry=registry)
        gauge.labels(**labels).set(1)
        return generate_latest(registry)

    def _startup(self, worker: WorkerInfo | None) -> bytes:
        stages = {"gateway": self.startup_stages, "worker": worker.startup_stages if worker else ()}
        registry = CollectorRegistry()
        gauge = Gauge(
            PREFIX + "startup_stage_seconds",
            "What a process did at its start, and how long",
            ("model_name", "process", "stage"),
            registry=registry,
        )
        for process, named in stages.items():
            for name, seconds in named:
                gauge.labels(self._model_name, process, name).set(seconds)
        return generate_latest(registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        gauge = Gauge(PREFIX + name, text, ("model_name",), registry=self._registry)
        return gauge.labels(self._model_name)

    def _counter(self, name: str, text: str) -> Counter:
        counter = Counter(PREFIX + name, text, ("model_name",), registry=self._registry)
        return counter.labels(self._model_name)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(
            PREFIX + name, text, ("model_name",), buckets=buckets, registry=self._registry
        )
        return histogram.labels(self._model_name)

    def _tally(self, name: str, text: str, buckets: Sequence[float]) -> HistogramTally:
        return HistogramTally(PREFIX + name, text, self._model_name, buckets, self._registry)

    def _latency(self, name: str, text: str) -> Histogram:
        return self._histogram(name, text, LATENCY_BUCKETS_S)


def _one_two_five(limit: int) -> tuple[int, ...]:
    steps = [
        mantissa * 10**exponent for exponent in range(len(str(limit))) for mantissa in (1, 2, 5)
    ]
    return tuple(steps[: bisect_left(steps, limit + 1)])
