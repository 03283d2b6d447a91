"""Traces of requests, sent to an OpenTelemetry collector by OTLP over HTTP.

A span a request, made at its end, with a child for each part of the time to its first token and one
for the rest. Imported only where an operator asks for traces. Sending is a thread's work: a
collector that is away costs its spans and nothing else. Prompts and answers are in no span.
"""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from twinfire import __version__
from twinfire.gateway.request_log import FinishedRequest

_TRACES_PATH = "/v1/traces"
_SEND_TIMEOUT_S = 5.0
_NANOS = 1_000_000_000


class RequestTraces:
    """Makes spans of requests and sends them."""

    def __init__(self, exporter: SpanExporter) -> None:
        resource = Resource.create({"service.name": "twinfire", "service.version": __version__})
        # Nobody but us may end it, so that what is left is sent once the last request is done.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("twinfire.gateway", __version__)
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to(cls, endpoint: str) -> RequestTraces:
        """Send to a collector's URL; without a path it gets the standard's `/v1/traces`."""
        has_path = urlsplit(endpoint).path not in ("", "/")
        url = endpoint if has_path else endpoint.rstrip("/") + _TRACES_PATH
        return cls(OTLPSpanExporter(endpoint=url, timeout=_SEND_TIMEOUT_S))

    def observe(self, request: FinishedRequest) -> None:
        """Make the spans of a request, in the client's trace where it named one."""
        start_ns = int(request.started_s * _NANOS)
        end_ns = start_ns + int(request.total_s * _NANOS)
        root = self._tracer.start_span(
            f"POST {request.endpoint}",
            self._propagator.extract({"traceparent": request.traceparent}),
            kind=SpanKind.SERVER,
            attributes=_attributes(request),
            start_time=start_ns,
        )
        if root.is_recording():
            if request.outcome != "finished":
                root.set_status(Status(StatusCode.ERROR, request.finish or request.outcome))
            inside = set_span_in_context(root)
            for name, begin_s, length_s in _parts(request):
                begin_ns = start_ns + int(begin_s * _NANOS)
                part = self._tracer.start_span(name, inside, start_time=begin_ns)
                part.end(begin_ns + int(length_s * _NANOS))
        root.end(end_ns)

    def close(self) -> None:
        """Send what is left; may take seconds where the collector is away."""
        self._provider.shutdown()


def _parts(request: FinishedRequest) -> Iterator[tuple[str, float, float]]:
    """Yield (name, seconds after the arrival, length in seconds), one after the other."""
    begin_s = 0.0
    for name, length_s in request.first_token_parts.items():
        if length_s > 0:
            yield name, begin_s, length_s
            begin_s += length_s
    if request.ttft_s is not None:
        yield "decode", request.ttft_s, max(request.total_s - request.ttft_s, 0.0)


def _attributes(request: FinishedRequest) -> dict[str, AttributeValue]:
    """Return the facts, under the names of OpenTelemetry's conventions where it has some."""
    facts: dict[str, AttributeValue | None] = {
        "http.request.method": "POST",
        "url.path": request.endpoint,
        "http.response.status_code": request.status,
        "gen_ai.request.model": request.model or None,
        "gen_ai.usage.input_tokens": request.num_input_tokens,
        "gen_ai.usage.output_tokens": request.num_output_tokens,
        "gen_ai.response.finish_reasons": [request.finish] if request.finish else None,
        "twinfire.request_id": request.request_id,
        "twinfire.account": request.account,
        "twinfire.outcome": request.outcome,
        "twinfire.cached_tokens": request.num_cached_tokens,
        "twinfire.reasoning_tokens": request.num_reasoning_tokens,
        "twinfire.time_to_first_token_s": request.ttft_s,
        "twinfire.prefill_worker": request.prefill_worker or None,
        "twinfire.decode_worker": request.decode_worker or None,
        "twinfire.route_reason": request.route_reason or None,
        "twinfire.attempts": request.num_attempts,
        "twinfire.resumes": request.num_resumes,
    }
    return {name: value for name, value in facts.items() if value is not None}
