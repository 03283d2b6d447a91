"""`GET /usage` and `/usage.csv`: the ledger, by record or summed up.

An account sees its own records, an administrator's token and the server's own keys see all.
"""

from __future__ import annotations

import asyncio
import csv
import io
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal, cast

import msgspec

from twinfire.accounts.prices import money
from twinfire.accounts.usage_record import UsageRecord
from twinfire.accounts.usage_store import GroupBy, UsageFilter, UsageStore, UsageSum
from twinfire.gateway.exchange import Exchange
from twinfire.gateway.gateway import Gateway
from twinfire.protocol.errors import InvalidRequest

_MAX_PAGE = 1000
_DEFAULT_PAGE = 100
_MAX_CSV_RECORDS = 1_000_000
_CSV_PAGE = 5000
_GROUPS = ("day", "model", "account")
_OUTCOMES = ("finished", "failed", "cancelled")
_FORMULA = re.compile(r"[=+\-\t\r]|@.*\(")
USAGE_PARAMETERS = {
    "account": "Name or id; an administrator's alone may be another's.",
    "model": "As clients called it.",
    "from": "First day of UTC, ISO 8601 time or Unix seconds.",
    "to": "The same, excluded.",
    "outcome": "finished, failed or cancelled.",
    "group_by": "day, model and account, joined by commas; empty for records.",
    "limit": "Records on a page, 1 to 1000.",
    "cursor": "The last page's `next_cursor`.",
}


class UsageEntry(msgspec.Struct, kw_only=True):
    """One request. Times in seconds; `price` is exact, in units of `currency`."""

    id: str
    request_id: str
    account: str
    """The account's name."""
    account_id: str
    token_id: str
    endpoint: str
    model: str
    created: float
    status: int
    outcome: str
    finish: str
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int
    price: str
    currency: str
    prefill_worker: str
    decode_worker: str
    route_reason: str
    queue_s: float
    ttft_s: float | None
    total_s: float


class UsageGroup(msgspec.Struct, kw_only=True):
    """Records added up. Those of day, model and account that were not grouped by are null."""

    day: str | None
    model: str | None
    account: str | None
    requests: int
    finished: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int
    price: str
    currency: str


class UsageAnswer(msgspec.Struct, kw_only=True):
    """Answer of `/usage`: `groups` where `group_by` was asked for, else records in `data`."""

    object: Literal["list"] = "list"
    data: list[UsageEntry] = []
    groups: list[UsageGroup] = []
    totals: list[UsageGroup]
    """Of everything that matches, one per currency."""
    has_more: bool = False
    next_cursor: str | None = None


class UsageApi:
    """The handlers, one method each."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def usage(self, exchange: Exchange) -> None:
        """`GET /usage`."""
        names = await self._account_names()
        query = _Query(exchange, names)
        store = await self._gateway.accounting.usage()
        body = await asyncio.to_thread(_answer, store, query, names)
        await exchange.answer(body)

    async def csv(self, exchange: Exchange) -> None:
        """`GET /usage.csv`: the same as a table."""
        names = await self._account_names()
        query = _Query(exchange, names)
        store = await self._gateway.accounting.usage()
        body = await asyncio.to_thread(_table, store, query, names)
        await exchange.answer(
            body,
            headers=(("content-disposition", 'attachment; filename="usage.csv"'),),
            content_type="text/csv; charset=utf-8",
        )

    async def _account_names(self) -> dict[str, str]:
        store = await self._gateway.accounting.accounts()
        return {one.id: one.name for one in await asyncio.to_thread(store.list)}


class _Query:
    """What the URL asks for; InvalidRequest names what is wrong."""

    def __init__(self, exchange: Exchange, names: dict[str, str]) -> None:
        fields = dict(exchange.query)
        for name in fields:
            if name not in USAGE_PARAMETERS:
                raise InvalidRequest(f"`{name[:80]}` is no parameter of /usage.", name[:80])
        outcome = fields.get("outcome")
        if outcome is not None and outcome not in _OUTCOMES:
            raise InvalidRequest(f"`outcome` is one of {', '.join(_OUTCOMES)}.", "outcome")
        self.which = UsageFilter(
            account_id=_visible_account(exchange, fields.get("account"), names),
            model=fields.get("model"),
            since_s=_time_s("from", fields.get("from")),
            until_s=_time_s("to", fields.get("to")),
            outcome=outcome,
        )
        self.groups: tuple[GroupBy, ...] = _groups(fields.get("group_by"))
        self.limit = _number("limit", fields.get("limit"), _DEFAULT_PAGE, 1, _MAX_PAGE)
        cursor = fields.get("cursor")
        self.before = None if cursor is None else _number("cursor", cursor, 0, 1, 2**62)


def _visible_account(exchange: Exchange, asked: str | None, names: dict[str, str]) -> str | None:
    """Return the account whose records are shown, None for all."""
    own = exchange.account
    if asked is not None:
        asked = next((one for one, name in names.items() if name == asked), asked)
    if own.is_admin:
        return asked
    if asked is not None and asked != own.id:
        raise InvalidRequest("`account` is not the token's own.", "account")
    return own.id


def _groups(text: str | None) -> tuple[GroupBy, ...]:
    if not text:
        return ()
    asked = text.split(",")
    for name in asked:
        if name not in _GROUPS or asked.count(name) > 1:
            raise InvalidRequest(
                f"`group_by` takes {', '.join(_GROUPS)}, each once and joined by commas.",
                "group_by",
            )
    return tuple(cast(GroupBy, name) for name in asked)


def _time_s(name: str, text: str | None) -> float | None:
    """Return Unix time of a day of UTC, of an ISO 8601 time or of seconds."""
    if text is None:
        return None
    try:
        if text.isascii() and text.replace(".", "", 1).isdecimal():
            return float(text)
        parsed = datetime.fromisoformat(text)
        return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise InvalidRequest(
            f"`{name}` must be a day (2026-11-30), an ISO 8601 time or Unix seconds.", name
        ) from None


def _number(name: str, text: str | None, default: int, least: int, most: int) -> int:
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and least <= int(text) <= most):
        raise InvalidRequest(f"`{name}` must be a whole number from {least} to {most}.", name)
    return int(text)


def _answer(store: UsageStore, query: _Query, names: dict[str, str]) -> bytes:
    totals = [usage_group(one, names) for one in store.sums(query.which)]
    if query.groups:
        groups = [usage_group(one, names) for one in store.sums(query.which, query.groups)]
        return msgspec.json.encode(UsageAnswer(groups=groups, totals=totals))
    page = store.page(query.which, query.limit + 1, query.before)
    shown = page[: query.limit]
    has_more = len(page) > len(shown)
    return msgspec.json.encode(
        UsageAnswer(
            data=[_entry(record, names) for _, record in shown],
            totals=totals,
            has_more=has_more,
            next_cursor=str(shown[-1][0]) if has_more else None,
        )
    )


def _table(store: UsageStore, query: _Query, names: dict[str, str]) -> bytes:
    out = io.StringIO()
    writer = csv.writer(out)
    if query.groups:
        writer.writerow(UsageGroup.__struct_fields__)
        for one in store.sums(query.which, query.groups):
            writer.writerow(_cells(usage_group(one, names)))
        return out.getvalue().encode()
    writer.writerow(UsageEntry.__struct_fields__)
    before, num_written = query.before, 0
    while num_written < _MAX_CSV_RECORDS:
        page = store.page(query.which, _CSV_PAGE, before)
        writer.writerows(_cells(_entry(record, names)) for _, record in page)
        num_written += len(page)
        if len(page) < _CSV_PAGE:
            break
        before = page[-1][0]
    return out.getvalue().encode()


def _cells(row: msgspec.Struct) -> Sequence[object]:
    """Return a row in which no text is a formula to a spreadsheet."""
    cells: list[object] = []
    for value in msgspec.structs.astuple(row):
        if isinstance(value, float):
            value = round(value, 6)
        cells.append("'" + value if isinstance(value, str) and _FORMULA.match(value) else value)
    return cells


def _entry(record: UsageRecord, names: dict[str, str]) -> UsageEntry:
    return UsageEntry(
        id=record.record_id,
        request_id=record.request_id,
        account=names.get(record.account_id, record.account_id),
        account_id=record.account_id,
        token_id=record.token_id,
        endpoint=record.endpoint,
        model=record.model,
        created=record.started_s,
        status=record.status,
        outcome=record.outcome,
        finish=record.finish,
        input_tokens=record.num_input_tokens,
        cached_tokens=record.num_cached_tokens,
        output_tokens=record.num_output_tokens,
        reasoning_tokens=record.num_reasoning_tokens,
        price=money(record.price_nanos),
        currency=record.currency,
        prefill_worker=record.prefill_worker,
        decode_worker=record.decode_worker,
        route_reason=record.route_reason,
        queue_s=record.queue_s,
        ttft_s=record.ttft_s,
        total_s=record.total_s,
    )


def usage_group(one: UsageSum, names: dict[str, str]) -> UsageGroup:
    """Return a sum as it is shown; `names` are those of the accounts by their ids."""
    return UsageGroup(
        day=one.day,
        model=one.model,
        account=None if one.account is None else names.get(one.account, one.account),
        requests=one.num_requests,
        finished=one.num_finished,
        input_tokens=one.num_input_tokens,
        cached_tokens=one.num_cached_tokens,
        output_tokens=one.num_output_tokens,
        reasoning_tokens=one.num_reasoning_tokens,
        price=money(one.price_nanos),
        currency=one.currency,
    )
