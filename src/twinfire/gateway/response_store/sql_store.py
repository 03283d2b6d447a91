"""Responses in the database of the accounts: SQLite for one gateway, PostgreSQL for several.

Every call runs on a thread. Times are Unix times of the gateways' clocks.
"""

from __future__ import annotations

import asyncio
import time
from base64 import b85decode, b85encode
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import sqlalchemy as sql
from sqlalchemy.engine import Connection, RowMapping

from twinfire.accounts.database import Database, Migration
from twinfire.gateway.response_store.stored_response import StoredResponse, StoreLimits

_ABANDONED_AFTER_S = 30.0
_NUM_THREADS = 4
T = TypeVar("T")

MIGRATIONS = (
    Migration(
        "responses",
        1,
        (
            "CREATE TABLE responses (response_id TEXT PRIMARY KEY, account_id TEXT NOT NULL, "
            "root_id TEXT NOT NULL, previous_id TEXT, status TEXT NOT NULL, "
            "is_background BOOLEAN NOT NULL, is_unwanted BOOLEAN NOT NULL, "
            "created_s DOUBLE PRECISION NOT NULL, used_s DOUBLE PRECISION NOT NULL, "
            "alive_s DOUBLE PRECISION NOT NULL, num_bytes BIGINT NOT NULL, "
            "response TEXT NOT NULL, input_items TEXT NOT NULL, events TEXT)",
            "CREATE INDEX responses_by_use ON responses (account_id, used_s)",
            "CREATE INDEX responses_by_age ON responses (used_s)",
            "CREATE INDEX responses_by_root ON responses (account_id, root_id)",
        ),
    ),
)
RESPONSES = sql.table(
    "responses",
    sql.column("response_id", sql.Text),
    sql.column("account_id", sql.Text),
    sql.column("root_id", sql.Text),
    sql.column("previous_id", sql.Text),
    sql.column("status", sql.Text),
    sql.column("is_background", sql.Boolean),
    sql.column("is_unwanted", sql.Boolean),
    sql.column("created_s", sql.Double),
    sql.column("used_s", sql.Double),
    sql.column("alive_s", sql.Double),
    sql.column("num_bytes", sql.BigInteger),
    sql.column("response", sql.Text),
    sql.column("input_items", sql.Text),
    sql.column("events", sql.Text),
)


class SqlResponseStore:
    """The store in one database; SQLite gets one thread, since it has one writer anyway."""

    def __init__(
        self,
        database: Database,
        limits: StoreLimits | None = None,
        *,
        saves_per_sweep: int = 64,
    ) -> None:
        database.migrate(MIGRATIONS)
        self._database = database
        self._limits = limits or StoreLimits()
        self._saves_per_sweep = saves_per_sweep
        self._num_saves = 0
        num_threads = _NUM_THREADS if database.is_shared else 1
        self._threads = ThreadPoolExecutor(num_threads, "twinfire-responses")

    async def save(self, stored: StoredResponse) -> None:
        """Add a response, or put it in the place of the one with its id."""
        await self._do(lambda connection: self._save(connection, stored))

    async def find(self, account_id: str, response_id: str) -> StoredResponse | None:
        """Return a response, None when there is none of that id."""
        query = sql.select(RESPONSES).where(_is(account_id, response_id))
        row = await self._do(lambda connection: connection.execute(query).mappings().first())
        return None if row is None else _stored(row)

    async def conversation(self, account_id: str, response_id: str) -> Sequence[StoredResponse]:
        """Return a response and all before it, the oldest first."""
        return await self._do(lambda connection: _conversation(connection, account_id, response_id))

    async def delete(self, account_id: str, response_id: str) -> bool:
        """Forget a response; whether there was one."""
        statement = sql.delete(RESPONSES).where(_is(account_id, response_id))
        return await self._do(lambda connection: connection.execute(statement).rowcount > 0)

    async def ask_to_cancel(self, account_id: str, response_id: str) -> None:
        """Tell whichever gateway runs a response that it is not wanted."""
        statement = (
            sql.update(RESPONSES).where(_is(account_id, response_id)).values(is_unwanted=True)
        )
        await self._do(lambda connection: connection.execute(statement))

    async def keep_alive(self, response_ids: Collection[str]) -> Collection[str]:
        """Tell that this gateway still runs responses; returns those that are not wanted."""
        mine = RESPONSES.c.response_id.in_(response_ids)

        def work(connection: Connection) -> list[str]:
            connection.execute(sql.update(RESPONSES).where(mine).values(alive_s=time.time()))
            unwanted = sql.select(RESPONSES.c.response_id).where(mine, RESPONSES.c.is_unwanted)
            return list(connection.scalars(unwanted))

        return await self._do(work)

    async def is_abandoned(self, response_id: str) -> bool:
        """Whether nobody has run an unfinished response for some time."""
        query = sql.select(RESPONSES.c.alive_s).where(RESPONSES.c.response_id == response_id)
        alive_s = await self._do(lambda connection: connection.scalar(query))
        return alive_s is not None and time.time() - alive_s > _ABANDONED_AFTER_S

    def close(self) -> None:
        """Let the threads end."""
        self._threads.shutdown(wait=True)

    async def _do(self, work: Callable[[Connection], T]) -> T:
        def transaction() -> T:
            with self._database.write() as connection:
                return work(connection)

        return await asyncio.get_running_loop().run_in_executor(self._threads, transaction)

    def _save(self, connection: Connection, stored: StoredResponse) -> None:
        now_s = time.time()
        num_bytes = len(stored.response) + len(stored.input_items) + len(stored.events or b"")
        values: dict[str, object] = {
            "account_id": stored.account_id,
            "root_id": stored.root_id,
            "previous_id": stored.previous_id,
            "status": stored.status,
            "is_background": stored.is_background,
            "created_s": stored.created_s,
            "used_s": now_s,
            "alive_s": now_s,
            "num_bytes": num_bytes,
            "response": stored.response.decode(),
            "input_items": stored.input_items.decode(),
            "events": None if stored.events is None else b85encode(stored.events).decode(),
        }
        mine = _is(stored.account_id, stored.response_id)
        if not connection.execute(sql.update(RESPONSES).where(mine).values(values)).rowcount:
            values |= {"response_id": stored.response_id, "is_unwanted": False}
            connection.execute(sql.insert(RESPONSES).values(values))
            # The conversation of a response that is kept is of use as long as it is.
            connection.execute(sql.update(RESPONSES).where(_of_root(stored)).values(used_s=now_s))
        self._num_saves += 1
        if self._num_saves % self._saves_per_sweep == 0:
            self._sweep(connection, stored.account_id, now_s)

    def _sweep(self, connection: Connection, account_id: str, now_s: float) -> None:
        """Forget what is too old of anybody, and too much of one account."""
        limits, columns = self._limits, RESPONSES.c
        oldest_s = now_s - limits.max_age_s
        connection.execute(sql.delete(RESPONSES).where(columns.used_s < oldest_s))
        running = sql.func.sum(columns.num_bytes).over(
            order_by=(columns.used_s.desc(), columns.response_id)
        )
        place = sql.func.row_number().over(order_by=(columns.used_s.desc(), columns.response_id))
        ranked = (
            sql.select(columns.response_id, running.label("total"), place.label("place"))
            .where(columns.account_id == account_id)
            .subquery()
        )
        too_much = sql.select(ranked.c.response_id).where(
            sql.or_(ranked.c.total > limits.max_bytes, ranked.c.place > limits.max_responses)
        )
        connection.execute(sql.delete(RESPONSES).where(columns.response_id.in_(too_much)))


def _conversation(
    connection: Connection, account_id: str, response_id: str
) -> list[StoredResponse]:
    root = sql.select(RESPONSES.c.root_id).where(_is(account_id, response_id)).scalar_subquery()
    columns = [column for column in RESPONSES.c if column is not RESPONSES.c.events]
    query = sql.select(*columns, sql.null().label("events")).where(
        RESPONSES.c.account_id == account_id, RESPONSES.c.root_id == root
    )
    by_id = {row["response_id"]: row for row in connection.execute(query).mappings()}
    path: list[StoredResponse] = []
    next_id: str | None = response_id
    while next_id is not None and next_id in by_id:
        path.append(_stored(by_id.pop(next_id)))
        next_id = path[-1].previous_id
    return path[::-1]


def _is(account_id: str, response_id: str) -> sql.ColumnElement[bool]:
    return sql.and_(RESPONSES.c.account_id == account_id, RESPONSES.c.response_id == response_id)


def _of_root(stored: StoredResponse) -> sql.ColumnElement[bool]:
    return sql.and_(
        RESPONSES.c.account_id == stored.account_id, RESPONSES.c.root_id == stored.root_id
    )


def _stored(row: RowMapping) -> StoredResponse:
    return StoredResponse(
        response_id=row["response_id"],
        account_id=row["account_id"],
        root_id=row["root_id"],
        previous_id=row["previous_id"],
        status=row["status"],
        is_background=row["is_background"],
        created_s=row["created_s"],
        response=row["response"].encode(),
        input_items=row["input_items"].encode(),
        events=None if row["events"] is None else b85decode(row["events"]),
    )
