"""`/v1/responses/{id}`: reading, streaming again, calling off and forgetting stored responses."""

from __future__ import annotations

import msgspec

from twinfire.gateway.dialects.openai_responses import account_id_of, stream_events
from twinfire.gateway.dialects.openai_responses_background import BackgroundRuns, unpacked_events
from twinfire.gateway.dialects.openai_responses_history import input_items, unknown_response
from twinfire.gateway.dialects.openai_responses_items import (
    RUNNING,
    DeletedResponse,
    ItemList,
    ResponseObject,
    ResponsesError,
)
from twinfire.gateway.errors import HttpError
from twinfire.gateway.exchange import Exchange
from twinfire.gateway.response_store.stored_response import ResponseStore, StoredResponse
from twinfire.protocol.errors import InvalidRequest

_MAX_PAGE = 100
_DEFAULT_PAGE = 20
_ABANDONED = "The server that made the response ended before it was complete."


class StoredResponses:
    """The handlers, one method each."""

    def __init__(self, store: ResponseStore, runs: BackgroundRuns) -> None:
        self._store = store
        self._runs = runs

    async def retrieve(self, exchange: Exchange) -> None:
        """`GET /v1/responses/{id}`."""
        stored = await self._find(exchange)
        if _flag(exchange, "stream"):
            await self._stream(exchange, stored)
            return
        await exchange.answer(await self._current(stored))

    async def cancel(self, exchange: Exchange) -> None:
        """`POST /v1/responses/{id}/cancel`: answers with what the response has become."""
        stored = await self._find(exchange)
        if not stored.is_background:
            raise InvalidRequest(
                "Only a response with `background` can be cancelled; others end with their "
                "connection.",
                "response_id",
            )
        await self._call_off(stored)
        await exchange.answer(await self._current(await self._find(exchange)))

    async def delete(self, exchange: Exchange) -> None:
        """`DELETE /v1/responses/{id}`; one that is still being made is called off first."""
        stored = await self._find(exchange)
        await self._call_off(stored)
        await self._store.delete(stored.account_id, stored.response_id)
        await exchange.answer(msgspec.json.encode(DeletedResponse(stored.response_id)))

    async def input_items(self, exchange: Exchange) -> None:
        """`GET /v1/responses/{id}/input_items`: the items of that request, newest first."""
        items = input_items(await self._find(exchange))
        if _choice(exchange, "order", ("desc", "asc")) == "desc":
            items.reverse()
        after = exchange.query.get("after")
        if after is not None:
            places = [place for place, item in enumerate(items) if item.id == after]
            if not places:
                raise InvalidRequest(f"`after` names no item of it: `{after[:80]}`.", "after")
            items = items[places[0] + 1 :]
        limit = _number(exchange, "limit", 1, _MAX_PAGE) or _DEFAULT_PAGE
        page = items[:limit]
        answer = ItemList(
            data=[msgspec.to_builtins(item) for item in page],
            first_id=page[0].id if page else None,
            last_id=page[-1].id if page else None,
            has_more=len(items) > limit,
        )
        await exchange.answer(msgspec.json.encode(answer))

    async def compact(self, exchange: Exchange) -> None:
        """`POST /v1/responses/compact`: a path that would else be taken for a response's."""
        raise HttpError(
            404, "Compaction is not offered here; see `truncation`.", code="unsupported"
        )

    async def _find(self, exchange: Exchange) -> StoredResponse:
        response_id = exchange.path_params["response_id"]
        stored = await self._store.find(account_id_of(exchange), response_id)
        if stored is None:
            raise unknown_response(response_id, "response_id")
        return stored

    async def _current(self, stored: StoredResponse) -> bytes:
        if stored.status not in RUNNING:
            return stored.response
        run = self._runs.get(stored.response_id)
        if run is not None:
            return msgspec.json.encode(run.response)
        if await self._store.is_abandoned(stored.response_id):
            response = msgspec.json.decode(stored.response, type=ResponseObject)
            response.status = "failed"
            response.error = ResponsesError("server_error", _ABANDONED)
            return msgspec.json.encode(response)
        return stored.response

    async def _stream(self, exchange: Exchange, stored: StoredResponse) -> None:
        last_seen = _number(exchange, "starting_after", 0, 2**53)
        count = 0 if last_seen is None else last_seen + 1
        run = self._runs.get(stored.response_id)
        if run is not None:
            await stream_events(exchange, run, count)
        elif stored.events is not None:
            await exchange.end_events(unpacked_events(stored.events, count))
        elif stored.status in RUNNING:
            raise InvalidRequest(
                "The response is being made by another server; poll it, or stream it once it is "
                "finished.",
                "stream",
            )
        else:
            raise InvalidRequest(
                "Only a response that was asked for with `background` and `stream` can be "
                "streamed again.",
                "stream",
            )

    async def _call_off(self, stored: StoredResponse) -> None:
        if stored.status not in RUNNING:
            return
        run = self._runs.get(stored.response_id)
        if run is None:
            await self._store.ask_to_cancel(stored.account_id, stored.response_id)
        else:
            run.call_off()
            await run.settled.wait()


def _flag(exchange: Exchange, name: str) -> bool:
    return _choice(exchange, name, ("false", "true")) == "true"


def _choice(exchange: Exchange, name: str, known: tuple[str, ...]) -> str:
    """Return a query parameter, the first of `known` where it is not given."""
    value = exchange.query.get(name, known[0])
    if value not in known:
        raise InvalidRequest(f"`{name}` must be {' or '.join(known)}, got {value[:80]!r}.", name)
    return value


def _number(exchange: Exchange, name: str, least: int, most: int) -> int | None:
    text = exchange.query.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and least <= int(text) <= most):
        raise InvalidRequest(
            f"`{name}` must be a whole number from {least} to {most}, got {text[:80]!r}.", name
        )
    return int(text)
