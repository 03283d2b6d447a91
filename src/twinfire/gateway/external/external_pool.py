"""A model served by other engines: answers its requests in place of our own dialects.

Owns the health checks, the attempts before the first byte and the delivery. Once a byte of an
answer is on its way nothing is ever replayed: what breaks then ends the stream with an error.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from itertools import zip_longest

from twinfire.gateway.dialects.request_headers import request_context
from twinfire.gateway.dialects.requests import SamplingFields
from twinfire.gateway.errors import not_ready, unknown_model
from twinfire.gateway.exchange import Exchange
from twinfire.gateway.external.answer_edits import AnswerEdits, EngineError, NotJson
from twinfire.gateway.external.engine_server import EnginePool, EngineServer
from twinfire.gateway.external.external_job import ExternalJob, read_job
from twinfire.gateway.external.external_metrics import ExternalMetrics
from twinfire.gateway.external.external_table import (
    DEFAULT_BOOTSTRAP_PORT,
    ExternalTable,
    check_external_table,
)
from twinfire.gateway.external.leg import EngineClient, FaultKind, LegFailed
from twinfire.gateway.external.pair import (
    Attempts,
    Engines,
    ExternalTallies,
    Flow,
    PlainFlow,
    SplitAnswer,
)
from twinfire.gateway.external.sglang import SglangPair
from twinfire.gateway.external.sse_rewriter import EventTooLong, SseRewriter
from twinfire.gateway.external.vllm import VllmPair
from twinfire.gateway.health_watch import HealthWatch
from twinfire.protocol.errors import DeadlineExceeded

_USAGE_WAIT_S = 1.0
"""For the prefill engine's count, when the answer's usage is there before it."""
_USAGE_MARK = b'"prompt_tokens"'
_CUT = "The engine ended the stream before the answer was complete."
_TOO_LATE = "The request's time was over before its answer was complete."

log = logging.getLogger(__name__)


class ExternalPool:
    """One external model. Start and close it on the gateway's event loop."""

    def __init__(self, names: Sequence[str], table: ExternalTable) -> None:
        """`names` are the public ones. InvalidRequest when the stanza cannot work."""
        check_external_table(table)
        self.names = tuple(names)
        self.engine = table.engine
        self.created_s = int(time.time())
        self._table = table
        self._client = EngineClient(table)
        prefill = EnginePool(
            EngineServer(url, "prefill", port)
            for url, port in zip_longest(
                table.prefill, table.bootstrap_ports, fillvalue=DEFAULT_BOOTSTRAP_PORT
            )
            if isinstance(url, str)
        )
        decode = EnginePool(
            EngineServer(url, stage)
            for stage, urls in table.pools()
            if stage != "prefill"
            for url in urls
        )
        self.engines = Engines(self._client, prefill, decode)
        self._flow = _make_flow(table, self.engines)
        self._watch: HealthWatch | None = None
        self.metrics = ExternalMetrics(self.names[0], self.servers, self.tallies)

    @property
    def servers(self) -> tuple[EngineServer, ...]:
        """All engines."""
        return (*self.engines.prefill.servers, *self.engines.decode.servers)

    @property
    def engine_model(self) -> str:
        """What the engines call the model."""
        return self._table.engine_model or self.names[0]

    @property
    def tallies(self) -> ExternalTallies:
        """Counts since the start."""
        return self.engines.tallies

    @property
    def unready_reason(self) -> str | None:
        """Why no request can be served now, None when one can."""
        return self._flow.unready_reason()

    async def start(self) -> None:
        """Begin to look after the engines; returns once each has been asked for its health."""
        self._client.start()
        self._watch = HealthWatch(
            self._client.session,
            self.servers,
            interval_s=self._table.health_interval_s,
            timeout_s=self._table.connect_timeout_s,
        )
        await self._watch.start()

    async def close(self) -> None:
        """Leave the engines alone."""
        if self._watch is not None:
            await self._watch.close()
        await self._flow.close()
        await self._client.close()

    async def handle(self, exchange: Exchange, path: str) -> None:
        """Answer one request to `path`; faults leave as exceptions that the exchange turns."""
        job = read_job(exchange, path, self.names, self.engine_model)
        if job.public_name not in self.names:
            raise unknown_model(job.public_name)
        if self.unready_reason is not None:
            raise not_ready(self.unready_reason)
        asked = SamplingFields(prompt_cache_key=job.session)
        deadline_s = request_context(exchange, asked).deadline_s
        self.tallies.requests += 1
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._answer(exchange, job)
            self.metrics.answered(time.monotonic() - exchange.arrival_s)
        except TimeoutError:
            raise DeadlineExceeded(_TOO_LATE) from None
        except asyncio.CancelledError:
            self.tallies.left += 1
            raise

    async def _answer(self, exchange: Exchange, job: ExternalJob) -> None:
        attempts = Attempts()
        for attempt in range(1, self._table.max_attempts + 1):
            try:
                answer = await self._flow.start(job, attempts)
            except LegFailed as failure:
                if not failure.may_go_on or attempt == self._table.max_attempts:
                    raise failure.http_error() from None
                self._retry(failure)
                continue
            delivery = _Delivery(exchange, job, answer, self.metrics)
            try:
                return await delivery.run()
            except LegFailed as failure:
                if delivery.has_begun:
                    self.tallies.broken_streams += 1
                    raise failure.http_error() from None
                if failure.kind is FaultKind.REFUSED or attempt == self._table.max_attempts:
                    raise failure.http_error() from None
                attempts.failed(answer.decode, failure)
                self._retry(failure)
            finally:
                answer.close()
        raise AssertionError("every attempt ends by itself")

    def _retry(self, failure: LegFailed) -> None:
        self.tallies.retries += 1
        log.warning("an engine failed before its first byte, trying again: %s", failure)


class _Delivery:
    """Brings one engine's answer to the client, with its edits."""

    def __init__(
        self, exchange: Exchange, job: ExternalJob, answer: SplitAnswer, metrics: ExternalMetrics
    ) -> None:
        self.has_begun = False
        self._metrics = metrics
        self._exchange = exchange
        self._job = job
        self._answer = answer
        self._edits = AnswerEdits.of(job)
        self._edits.is_split = answer.is_split

    async def run(self) -> None:
        """Deliver everything; LegFailed for whatever the engine does wrong."""
        leg = self._answer.decode
        try:
            await (self._stream() if self._job.is_stream else self._whole())
        except EngineError as error:
            if error.status >= 500:
                raise leg.broken(error.message) from None
            raise leg.refused(error.status, error.message) from None
        except (NotJson, EventTooLong):
            raise leg.broken("The engine sent something that is not an answer.") from None

    async def _whole(self) -> None:
        content = await self._answer.read_all()
        await self._learn_cached_tokens(content)
        await self._exchange.answer(self._edits.apply(content))

    async def _stream(self) -> None:
        answer, rewriter = self._answer, SseRewriter(self._edits)
        self._exchange.allow_early_start()
        while piece := await answer.read_piece(is_first=not self.has_begun):
            before_usage = _before_usage(piece)
            await self._send(rewriter.feed(piece[:before_usage]), rewriter)
            if before_usage < len(piece):
                await self._learn_cached_tokens(piece)
                await self._send(rewriter.feed(piece[before_usage:]), rewriter)
        last = rewriter.finish()
        if not rewriter.is_done:
            await self._send(last, rewriter)
            raise answer.decode.broken(_CUT)
        answer.decode.server.breaker.succeeded()
        self.has_begun = True
        await self._exchange.end_events(last)

    async def _send(self, events: bytes, rewriter: SseRewriter) -> None:
        if rewriter.failure is not None and not self.has_begun:
            raise rewriter.failure
        # A comment alone is no answer: until there is data, another engine may still give it.
        if events and rewriter.num_events:
            if not self.has_begun:
                self._metrics.began(time.monotonic() - self._exchange.arrival_s)
            self.has_begun = True
            await self._exchange.send_events(events)
        if rewriter.failure is not None:
            raise rewriter.failure

    async def _learn_cached_tokens(self, content: bytes) -> None:
        if self._answer.is_split and _USAGE_MARK in content:
            await self._answer.settle_prefill(_USAGE_WAIT_S)
        self._edits.cached_tokens = self._answer.cached_tokens


def _before_usage(piece: bytes) -> int:
    """Return where the event with the usage begins, the piece's length without one.

    What comes before it need not wait for the prefill engine's count.
    """
    mark = piece.find(_USAGE_MARK)
    return len(piece) if mark < 0 else piece.rfind(b"\n", 0, mark) + 1


def _make_flow(table: ExternalTable, engines: Engines) -> Flow:
    if not table.prefill:
        return PlainFlow(engines)
    return VllmPair(engines) if table.engine == "vllm" else SglangPair(engines)
