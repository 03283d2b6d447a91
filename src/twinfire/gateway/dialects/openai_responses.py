"""`/v1/responses`: making responses, and coming back to those that were stored."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace

import msgspec

from twinfire.gateway.dialects.chat_answer import collect_chat, stream_chat
from twinfire.gateway.dialects.chat_job import ChatJob
from twinfire.gateway.dialects.json_body import decode_body
from twinfire.gateway.dialects.openai_responses_background import BackgroundRun, BackgroundRuns
from twinfire.gateway.dialects.openai_responses_chat import check_request
from twinfire.gateway.dialects.openai_responses_fit import prepare_response
from twinfire.gateway.dialects.openai_responses_history import (
    NO_HISTORY,
    History,
    read_history,
    without_references,
)
from twinfire.gateway.dialects.openai_responses_input import checked_items, named_items
from twinfire.gateway.dialects.openai_responses_items import RUNNING, InputTokens, new_response_id
from twinfire.gateway.dialects.openai_responses_object import begun_response
from twinfire.gateway.dialects.openai_responses_requests import InputItem, ResponsesRequest
from twinfire.gateway.dialects.openai_responses_stream import ResponseWriter
from twinfire.gateway.errors import Fault
from twinfire.gateway.exchange import Exchange
from twinfire.gateway.gateway import Gateway
from twinfire.gateway.response_store.stored_response import ResponseStore, StoredResponse

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A request that has passed every check."""

    job: ChatJob
    writer: ResponseWriter
    stored: StoredResponse
    """As it is kept, but for what it has become."""


class CreateResponse:
    """`POST /v1/responses` and `POST /v1/responses/input_tokens`."""

    def __init__(self, gateway: Gateway, store: ResponseStore, runs: BackgroundRuns) -> None:
        self._gateway = gateway
        self._store = store
        self._runs = runs
        self._decoder = msgspec.json.Decoder(ResponsesRequest)

    async def __call__(self, exchange: Exchange) -> None:
        """Answer one request."""
        request = decode_body(exchange.body, self._decoder)
        if request.background:
            run = BackgroundRun(self._gateway, exchange)
            await self._begin_background(exchange, run, request)
            return
        prepared = await self._prepare(exchange, request)
        if request.stream:
            await self._stream(exchange, prepared)
        else:
            answer = await collect_chat(exchange, prepared.job)
            response = prepared.writer.collected(answer)
            await self._keep_finished(prepared)
            await exchange.answer(msgspec.json.encode(response))

    async def count_tokens(self, exchange: Exchange) -> None:
        """Answer how long the prompt of a request is."""
        request = decode_body(exchange.body, self._decoder)
        prepared = await self._prepare(exchange, request)
        count = InputTokens(len(prepared.job.prompt))
        await exchange.answer(msgspec.json.encode(count))

    async def _prepare(self, exchange: Exchange, request: ResponsesRequest) -> _Prepared:
        check_request(request)
        given = checked_items(request.input)
        account_id = account_id_of(exchange)
        history = NO_HISTORY
        if request.previous_response_id is not None:
            history = await read_history(self._store, account_id, request.previous_response_id)
        items = await without_references(self._store, account_id, given)
        response_id = new_response_id()
        root_id = history.root_id or response_id
        job = await prepare_response(
            self._gateway, exchange, request, [*history.items, *items], root_id
        )
        response = begun_response(response_id, request, job)
        stored = _unfinished(response_id, account_id, history, request, items)
        return _Prepared(job, ResponseWriter(response, job), stored)

    async def _stream(self, exchange: Exchange, prepared: _Prepared) -> None:
        exchange.fault_writer = prepared.writer.failed
        exchange.before_last_events = lambda: self._keep_finished(prepared)
        await stream_chat(exchange, prepared.job, prepared.writer)

    async def _begin_background(
        self, client: Exchange, run: BackgroundRun, request: ResponsesRequest
    ) -> None:
        prepared = await self._prepare(run.exchange, request)
        writer = prepared.writer
        run.response = writer.response

        def failed_early(fault: Fault) -> bytes:
            run.events.add(writer.failed(fault))
            return b""

        async def work(exchange: Exchange) -> None:
            exchange.fault_writer = writer.failed
            exchange.fault_body = failed_early
            await stream_chat(exchange, prepared.job, writer)

        async def settle() -> None:
            if writer.response.status in RUNNING:
                run.events.add(writer.cancelled())
            await self._keep(prepared, run.events.packed() if request.stream else None)

        run.events.add(writer.created())
        await self._keep(prepared)
        accepted = msgspec.json.encode(writer.response)
        self._runs.start(run, work, settle)
        if request.stream:
            await stream_events(client, run, 0)
        else:
            await client.answer(accepted)

    async def _keep(self, prepared: _Prepared, events: bytes | None = None) -> None:
        response = prepared.writer.response
        if not response.store:
            return
        stored = replace(
            prepared.stored,
            status=response.status,
            response=msgspec.json.encode(response),
            events=events,
        )
        await self._store.save(stored)

    async def _keep_finished(self, prepared: _Prepared) -> None:
        """Store an answer, which the client gets even where that fails."""
        try:
            await self._keep(prepared)
        except Exception:
            log.exception("response %s could not be stored", prepared.writer.response.id)


async def stream_events(exchange: Exchange, run: BackgroundRun, count: int) -> None:
    """Answer with the events of a running response from number `count` on."""
    exchange.allow_early_start()
    while frames := await run.events.beyond(count):
        await exchange.send_events(frames)
        count += frames.count(b"\n\n")
    await exchange.end_events(b"")


def account_id_of(exchange: Exchange) -> str:
    """Return whose response it is."""
    return exchange.account.id


def _unfinished(
    response_id: str,
    account_id: str,
    history: History,
    request: ResponsesRequest,
    items: list[InputItem],
) -> StoredResponse:
    return StoredResponse(
        response_id=response_id,
        account_id=account_id,
        root_id=history.root_id or response_id,
        previous_id=request.previous_response_id,
        status="in_progress",
        is_background=bool(request.background),
        created_s=time.time(),
        response=b"",
        input_items=msgspec.json.encode(named_items(items, response_id)),
    )
