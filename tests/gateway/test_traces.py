"""Traces of requests: what a collector gets over HTTP from a running gateway."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from support.gateway_server import MODEL, RunningGateway, running_gateway
from support.raw_http import request
from support.scripted_backend import ScriptedBackend, say
from twinfire.cli.tracing_option import checked_endpoint
from twinfire.gateway.settings import GatewaySettings
from twinfire.protocol.errors import InvalidRequest

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """An OTLP/HTTP collector that keeps what it gets."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.exports: list[ExportTraceServiceRequest] = []
        kept = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                kept.paths.append(self.path)
                kept.exports.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def spans(self) -> list[Span]:
        return [
            span
            for export in self.exports
            for resource in export.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@pytest.fixture
def collector() -> Iterator[Collector]:
    running = Collector()
    thread = threading.Thread(target=running.server.serve_forever, daemon=True)
    thread.start()
    yield running
    running.server.shutdown()
    running.server.server_close()
    thread.join(10)


@contextmanager
def traced(url: str) -> Iterator[RunningGateway]:
    settings = GatewaySettings(otlp_endpoint=url)
    with running_gateway(settings, lambda: ScriptedBackend(say("Hello."))) as gateway:
        yield gateway


def chat(gateway: RunningGateway, headers: dict[str, str] | None = None, **more: object) -> int:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "A secret?"}], **more}
    return request(gateway.server.address, "POST", "/v1/chat/completions", body, headers).status


def facts(span: Span) -> dict[str, object]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def test_a_request_is_a_span_with_a_child_for_each_part(collector: Collector) -> None:
    with traced(collector.url) as gateway:
        assert chat(gateway, {"traceparent": f"00-{TRACE}-{PARENT}-01"}) == 200
    # What is left is sent at the gateway's end.
    spans = collector.spans()
    assert collector.paths == ["/v1/traces"]
    (root,) = [span for span in spans if span.kind == Span.SPAN_KIND_SERVER]
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
    assert root.name == "POST /v1/chat/completions"
    told = facts(root)
    assert told["gen_ai.request.model"] == MODEL
    assert told["gen_ai.usage.output_tokens"] == len("Hello.") + 1
    assert told["http.response.status_code"] == 200
    assert told["twinfire.account"] == "open"
    children = [span for span in spans if span.parent_span_id == root.span_id]
    assert {"request", "prefill_queue", "prefill", "decode"} <= {one.name for one in children}
    assert all(one.trace_id == root.trace_id for one in children)
    assert all(one.start_time_unix_nano >= root.start_time_unix_nano for one in children)
    assert abs(time.time() - root.end_time_unix_nano / 1e9) < 60
    assert "secret" not in str(collector.exports)


def test_requests_without_a_trace_begin_their_own(collector: Collector) -> None:
    with traced(collector.url + "/") as gateway:
        for header in ({}, {"traceparent": "00-nonsense"}):
            assert chat(gateway, header) == 200
    roots = [span for span in collector.spans() if span.kind == Span.SPAN_KIND_SERVER]
    assert len({span.trace_id for span in roots}) == 2
    assert all(not span.parent_span_id for span in roots)


def test_a_trace_that_is_not_sampled_is_not_sent(collector: Collector) -> None:
    with traced(collector.url) as gateway:
        assert chat(gateway, {"traceparent": f"00-{TRACE}-{PARENT}-00"}) == 200
    assert collector.spans() == []


def test_faults_are_told(collector: Collector) -> None:
    with traced(collector.url + "/my/traces") as gateway:
        assert chat(gateway, temperature=-1) == 400
    (root,) = collector.spans()
    assert collector.paths == ["/my/traces"]
    assert root.status.code == Status.STATUS_CODE_ERROR
    assert facts(root)["http.response.status_code"] == 400


def test_a_collector_that_is_away_costs_nobody_anything() -> None:
    began_s = time.monotonic()
    with traced("http://127.0.0.1:9") as gateway:
        assert chat(gateway) == 200
    assert time.monotonic() - began_s < 20


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:4318", "ftp://x", "http://", "http://[::1", "http://x:y"]
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match="otlp-endpoint"):
        checked_endpoint(url)


def test_urls_are_taken() -> None:
    assert checked_endpoint(None) is None
    assert checked_endpoint("https://collector.example/v1/traces")
