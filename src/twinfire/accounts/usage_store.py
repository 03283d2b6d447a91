"""The usage ledger in the database: records are appended and never changed.

What an account has spent on a day is summed up in the same transaction, so that a budget needs no
scan and gateways that share the database share the sum.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
from sqlalchemy import Connection, Row, TextClause, bindparam, text

from twinfire.accounts.database import Database, Migration
from twinfire.accounts.usage_record import UsageRecord

MIGRATIONS = (
    Migration(
        "usage",
        1,
        (
            """CREATE TABLE usage_records (
                number {identity},
                record_id TEXT NOT NULL UNIQUE,
                request_id TEXT NOT NULL,
                account_id TEXT NOT NULL,
                token_id TEXT NOT NULL,
                endpoint TEXT NOT NULL,
                model TEXT NOT NULL,
                started_s DOUBLE PRECISION NOT NULL,
                day TEXT NOT NULL,
                status INTEGER NOT NULL,
                outcome TEXT NOT NULL,
                finish TEXT NOT NULL,
                num_input_tokens BIGINT NOT NULL,
                num_cached_tokens BIGINT NOT NULL,
                num_output_tokens BIGINT NOT NULL,
                num_reasoning_tokens BIGINT NOT NULL,
                price_nanos BIGINT NOT NULL,
                currency TEXT NOT NULL,
                prefill_worker TEXT NOT NULL,
                decode_worker TEXT NOT NULL,
                route_reason TEXT NOT NULL,
                queue_s DOUBLE PRECISION NOT NULL,
                ttft_s DOUBLE PRECISION,
                total_s DOUBLE PRECISION NOT NULL
            )""",
            "CREATE INDEX usage_of_account ON usage_records (account_id, started_s)",
            "CREATE INDEX usage_by_time ON usage_records (started_s)",
            """CREATE TABLE account_days (
                account_id TEXT NOT NULL,
                day TEXT NOT NULL,
                num_tokens BIGINT NOT NULL,
                price_nanos BIGINT NOT NULL,
                PRIMARY KEY (account_id, day)
            )""",
        ),
    ),
)

_COLUMNS = (*UsageRecord.__struct_fields__, "day")
_INSERT = text(
    f"INSERT INTO usage_records ({', '.join(_COLUMNS)}) "
    f"VALUES ({', '.join(':' + name for name in _COLUMNS)})"
)
_ADD_TO_DAY = text(
    "INSERT INTO account_days VALUES (:account_id, :day, :num_tokens, :price_nanos) "
    "ON CONFLICT (account_id, day) DO UPDATE SET "
    "num_tokens = account_days.num_tokens + excluded.num_tokens, "
    "price_nanos = account_days.price_nanos + excluded.price_nanos "
    "RETURNING num_tokens, price_nanos"
)
_KNOWN = text("SELECT record_id FROM usage_records WHERE record_id IN :ids").bindparams(
    bindparam("ids", expanding=True)
)
GroupBy = Literal["day", "model", "account"]
_GROUP_COLUMNS: dict[GroupBy, str] = {"day": "day", "model": "model", "account": "account_id"}


class DaySpent(msgspec.Struct, frozen=True):
    """What an account has used on a day."""

    num_tokens: int = 0
    price_nanos: int = 0


@dataclass(frozen=True, slots=True)
class UsageFilter:
    """Which records are meant; None is all."""

    account_id: str | None = None
    model: str | None = None
    since_s: float | None = None
    """Unix time, included."""
    until_s: float | None = None
    """Unix time, excluded."""
    outcome: str | None = None

    def where(self) -> tuple[str, dict[str, object]]:
        """Return the condition and its values."""
        conditions = {
            "account_id = :account_id": ("account_id", self.account_id),
            "model = :model": ("model", self.model),
            "started_s >= :since_s": ("since_s", self.since_s),
            "started_s < :until_s": ("until_s", self.until_s),
            "outcome = :outcome": ("outcome", self.outcome),
        }
        used = {sql: pair for sql, pair in conditions.items() if pair[1] is not None}
        return " AND ".join(used) or "1 = 1", dict(used.values())


class UsageSum(msgspec.Struct, frozen=True, kw_only=True):
    """Many records added up. Of day, model and account those that were not grouped by are None."""

    day: str | None = None
    model: str | None = None
    account: str | None = None
    currency: str = ""
    num_requests: int = 0
    num_finished: int = 0
    num_input_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_reasoning_tokens: int = 0
    price_nanos: int = 0


class UsageStore:
    """The tables `usage_records` and `account_days`."""

    def __init__(self, database: Database) -> None:
        """Bring the tables up to date."""
        self._database = database
        database.migrate(MIGRATIONS)

    def append(
        self, records: Sequence[UsageRecord], *, may_be_known: bool = False
    ) -> dict[tuple[str, str], DaySpent]:
        """Commit records, all or none, and return (account id, day) -> what is spent then.

        `may_be_known`: an earlier try may have been committed without our hearing of it.
        """
        with self._database.write() as connection:
            if may_be_known:
                records = _unknown(connection, records)
            if records:
                rows = [{**msgspec.structs.asdict(one), "day": one.day} for one in records]
                connection.execute(_INSERT, rows)
            return {key: _add_to_day(connection, key, spent) for key, spent in _by_day(records)}

    def spent(self, account_id: str, day: str) -> DaySpent:
        """Return what an account has used on a day of UTC."""
        with self._database.read() as connection:
            row = connection.execute(
                text(
                    "SELECT num_tokens, price_nanos FROM account_days "
                    "WHERE account_id = :account_id AND day = :day"
                ),
                {"account_id": account_id, "day": day},
            ).first()
        return DaySpent() if row is None else DaySpent(row.num_tokens, row.price_nanos)

    def page(
        self, which: UsageFilter, limit: int, before: int | None = None
    ) -> list[tuple[int, UsageRecord]]:
        """Return up to `limit` records with their numbers, the latest first, below `before`."""
        condition, values = which.where()
        if before is not None:
            condition += " AND number < :before"
            values["before"] = before
        query = text(
            f"SELECT * FROM usage_records WHERE {condition} ORDER BY number DESC LIMIT :limit"
        )
        with self._database.read() as connection:
            rows = connection.execute(query, {**values, "limit": limit}).all()
        return [(row.number, _record(row)) for row in rows]

    def sums(self, which: UsageFilter, group_by: Sequence[GroupBy] = ()) -> list[UsageSum]:
        """Return sums by group and currency, in the groups' order."""
        condition, values = which.where()
        groups = {name: _GROUP_COLUMNS[name] for name in group_by}
        shown = "".join(f"{column} AS {name}_, " for name, column in groups.items())
        keys = ", ".join((*groups.values(), "currency"))
        query = _sums_query(f"SELECT {shown}currency, ", f"{condition} GROUP BY {keys}", keys)
        with self._database.read() as connection:
            rows = connection.execute(query, values).all()
        return [_sum(row, groups) for row in rows]


def _sums_query(head: str, condition: str, keys: str) -> TextClause:
    return text(
        f"{head} COUNT(*) AS num_requests, "
        "SUM(CASE WHEN outcome = 'finished' THEN 1 ELSE 0 END) AS num_finished, "
        "SUM(num_input_tokens) AS num_input_tokens, "
        "SUM(num_cached_tokens) AS num_cached_tokens, "
        "SUM(num_output_tokens) AS num_output_tokens, "
        "SUM(num_reasoning_tokens) AS num_reasoning_tokens, "
        "SUM(price_nanos) AS price_nanos "
        f"FROM usage_records WHERE {condition} ORDER BY {keys}"
    )


def _sum(row: Row[tuple[object, ...]], groups: Iterable[str]) -> UsageSum:
    values = row._mapping
    numbers = (*(name for name in UsageSum.__struct_fields__ if name[:4] == "num_"), "price_nanos")
    fields: dict[str, object] = {name: values[f"{name}_"] for name in groups}
    fields |= {name: int(values[name]) for name in numbers}
    return msgspec.convert({**fields, "currency": values["currency"]}, UsageSum)


def _record(row: Row[tuple[object, ...]]) -> UsageRecord:
    values = row._mapping
    return UsageRecord(**{name: values[name] for name in UsageRecord.__struct_fields__})


def _unknown(connection: Connection, records: Sequence[UsageRecord]) -> list[UsageRecord]:
    ids = [record.record_id for record in records]
    known = set(connection.execute(_KNOWN, {"ids": ids}).scalars())
    return [record for record in records if record.record_id not in known]


def _by_day(
    records: Sequence[UsageRecord],
) -> Iterator[tuple[tuple[str, str], DaySpent]]:
    """Yield what is added, always in one order: two writers then never wait for each other."""
    tokens: dict[tuple[str, str], int] = defaultdict(int)
    nanos: dict[tuple[str, str], int] = defaultdict(int)
    for record in records:
        key = (record.account_id, record.day)
        tokens[key] += record.num_input_tokens + record.num_output_tokens
        nanos[key] += record.price_nanos
    for key in sorted(tokens):
        yield key, DaySpent(tokens[key], nanos[key])


def _add_to_day(connection: Connection, key: tuple[str, str], spent: DaySpent) -> DaySpent:
    account_id, day = key
    row = connection.execute(
        _ADD_TO_DAY,
        {
            "account_id": account_id,
            "day": day,
            "num_tokens": spent.num_tokens,
            "price_nanos": spent.price_nanos,
        },
    ).one()
    return DaySpent(row.num_tokens, row.price_nanos)
