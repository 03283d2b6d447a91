"""One engine's answer on its way to the client.

Edits it, counts it, and has its record committed before the client sees its end. Never tries again:
whoever made it does, while nothing has been sent.
"""

from __future__ import annotations

import time

from twinfire.gateway.accounting.bill import Bill
from twinfire.gateway.backends.route_record import RouteRecord
from twinfire.gateway.dialects.request_headers import show_route
from twinfire.gateway.exchange import Exchange
from twinfire.gateway.external.answer_edits import AnswerEdits, EngineError, NotJson
from twinfire.gateway.external.answer_meter import AnswerMeter
from twinfire.gateway.external.external_job import ExternalJob
from twinfire.gateway.external.external_metrics import ExternalMetrics
from twinfire.gateway.external.pair import SplitAnswer
from twinfire.gateway.external.sse_rewriter import EventTooLong, SseRewriter

_USAGE_WAIT_S = 1.0
"""For the prefill engine's count, when the answer's usage is there before it."""
_CUT = "The engine ended the stream before the answer was complete."


class Delivery:
    """Brings one engine's answer to the client, with its edits; the bill is settled before its end.

    What tells of the end (the last finish, the usage, the end mark) leaves at once, after that.
    """

    def __init__(
        self,
        exchange: Exchange,
        job: ExternalJob,
        answer: SplitAnswer,
        metrics: ExternalMetrics,
        bill: Bill,
        route: RouteRecord,
    ) -> None:
        self.has_begun = False
        self._metrics = metrics
        self._exchange = exchange
        self._job = job
        self._answer = answer
        self._bill = bill
        self._route = route
        self._meter = AnswerMeter(job.num_prompt_tokens, is_split=answer.is_split)
        self._edits = AnswerEdits.of(job, self._meter, is_split=answer.is_split)
        bill.follow(self._meter, lambda: route)

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
        finally:
            # Also of what is cut short: the decoding engine takes for cached what it was sent.
            self._learn_cached_tokens()

    async def _whole(self) -> None:
        fields = self._edits.read_whole(await self._answer.read_all())
        await self._settle()
        await self._exchange.answer(self._edits.whole(fields))

    async def _stream(self) -> None:
        answer, rewriter = self._answer, SseRewriter(self._edits)
        self._exchange.allow_early_start()
        last = b""
        while piece := await answer.read_piece(is_first=not self.has_begun):
            self._learn_cached_tokens()
            last += await self._pass_on(rewriter.feed(piece), rewriter)
        last += await self._pass_on(rewriter.finish(), rewriter)
        if not rewriter.is_done:
            raise answer.decode.broken(_CUT)
        answer.decode.server.breaker.succeeded()
        self.has_begun = True
        await self._settle()
        await self._exchange.end_events(last + self._edits.closing_event())

    async def _pass_on(self, events: bytes, rewriter: SseRewriter) -> bytes:
        """Send events, or return them where they tell of the answer's end."""
        if rewriter.failure is not None and not self.has_begun:
            raise rewriter.failure
        # A comment alone is no answer: until there is data, another engine may still give it.
        may_be_sent = bool(events and rewriter.num_events)
        if may_be_sent and self._meter.ttft_s is None:
            self._meter.ttft_s = time.monotonic() - self._exchange.arrival_s
            self._metrics.began(self._meter.ttft_s)
        if may_be_sent and not self._edits.is_finished:
            if not self.has_begun:
                show_route(self._exchange, self._route)
            self.has_begun = True
            await self._exchange.send_events(events)
        if rewriter.failure is not None:
            raise rewriter.failure
        return events if may_be_sent and self._edits.is_finished else b""

    async def _settle(self) -> None:
        """Commit the record of what the client is about to see."""
        if self._answer.is_split:
            await self._answer.settle_prefill(_USAGE_WAIT_S)
        self._learn_cached_tokens()
        await self._bill.settle()
        show_route(self._exchange, self._route)

    def _learn_cached_tokens(self) -> None:
        cached_tokens = self._answer.cached_tokens
        self._edits.cached_tokens = self._meter.split_cached_tokens = cached_tokens
        self._route.cached_tokens = self._meter.num_cached_tokens
