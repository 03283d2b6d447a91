"""A model served by other engines: answers its requests in place of our own dialects.

Owns the health checks and the attempts before the first byte. Once a byte of an answer is on its
way nothing is ever replayed: what breaks then ends the stream with an error.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import zip_longest

from twinfire.gateway.accounting.bill import Bill
from twinfire.gateway.backends.route_record import RouteRecord
from twinfire.gateway.dialects.request_headers import request_context
from twinfire.gateway.dialects.requests import SamplingFields
from twinfire.gateway.errors import not_ready
from twinfire.gateway.exchange import Exchange
from twinfire.gateway.external.delivery import Delivery
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
from twinfire.gateway.external.vllm import VllmPair
from twinfire.gateway.health_watch import HealthWatch
from twinfire.protocol.errors import DeadlineExceeded

_TOO_LATE = "The request's time was over before its answer was complete."

Admit = Callable[[Exchange, str, int, int], Awaitable[Bill]]
"""Takes the account's limits for a model, prompt tokens and the most output tokens."""

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
        # What accounts may read names no host of the operator's.
        self._server_names = {
            server: f"{server.stage}-{number}"
            for pool in (prefill, decode)
            for number, server in enumerate(pool.servers)
        }
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

    async def handle(self, exchange: Exchange, path: str, admit: Admit) -> None:
        """Answer one request to `path`; faults leave as exceptions that the exchange turns."""
        job = read_job(exchange, path, self.names, self.engine_model)
        if self.unready_reason is not None:
            raise not_ready(self.unready_reason)
        asked = SamplingFields(prompt_cache_key=job.session)
        deadline_s = request_context(exchange, asked).deadline_s
        max_tokens = job.max_tokens * job.num_sequences
        bill = await admit(exchange, job.public_name, job.num_prompt_tokens, max_tokens)
        self.tallies.requests += 1
        try:
            await self._answer_in_time(exchange, job, bill, deadline_s)
        except BaseException as error:
            exchange.close_bill(error)
            raise
        self.metrics.answered(time.monotonic() - exchange.arrival_s)

    async def _answer_in_time(
        self, exchange: Exchange, job: ExternalJob, bill: Bill, deadline_s: float | None
    ) -> None:
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._answer(exchange, job, bill)
        except TimeoutError:
            raise DeadlineExceeded(_TOO_LATE) from None
        except asyncio.CancelledError:
            self.tallies.left += 1
            raise

    async def _answer(self, exchange: Exchange, job: ExternalJob, bill: Bill) -> None:
        attempts = Attempts()
        for attempt in range(1, self._table.max_attempts + 1):
            try:
                answer = await self._flow.start(job, attempts)
            except LegFailed as failure:
                if not failure.may_go_on or attempt == self._table.max_attempts:
                    raise failure.http_error() from None
                self._retry(failure)
                continue
            route = self._route(answer, attempt)
            delivery = Delivery(exchange, job, answer, self.metrics, bill, route)
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

    def _route(self, answer: SplitAnswer, num_attempts: int) -> RouteRecord:
        names, prefill = self._server_names, answer.prefill_server
        return RouteRecord(
            decode=names[answer.decode.server],
            prefill=None if prefill is None else names[prefill],
            num_attempts=num_attempts,
        )

    def _retry(self, failure: LegFailed) -> None:
        self.tallies.retries += 1
        log.warning("an engine failed before its first byte, trying again: %s", failure)


def _make_flow(table: ExternalTable, engines: Engines) -> Flow:
    if not table.prefill:
        return PlainFlow(engines)
    return VllmPair(engines) if table.engine == "vllm" else SglangPair(engines)
