"""Rates of accounts that several gateways share, in their common database.

A gateway counts what it runs in a row of its own and keeps that row alive; a dead gateway's row is
no longer counted after half a minute. Nothing here has to survive the database's own crash.
"""

from __future__ import annotations

from sqlalchemy import Connection, Row, text

from twinfire.accounts.database import Database, Migration
from twinfire.accounts.limits import Limits
from twinfire.accounts.rates import Levels, RateState

HEARTBEAT_S = 10.0
_DEAD_AFTER_S = 30.0

MIGRATIONS = (
    Migration(
        "rates",
        1,
        (
            """CREATE TABLE account_rates (
                account_id TEXT PRIMARY KEY,
                requests DOUBLE PRECISION NOT NULL,
                tokens DOUBLE PRECISION NOT NULL,
                updated_s DOUBLE PRECISION NOT NULL
            )""",
            """CREATE TABLE account_running (
                account_id TEXT NOT NULL,
                gateway_id TEXT NOT NULL,
                num_running BIGINT NOT NULL,
                seen_s DOUBLE PRECISION NOT NULL,
                PRIMARY KEY (account_id, gateway_id)
            )""",
        ),
    ),
)

_NOW = "EXTRACT(EPOCH FROM clock_timestamp())::double precision"
"""The database's clock: those of the gateways differ."""
_ROW = (
    "SELECT set_config('synchronous_commit', 'off', true), "
    f"requests, tokens, updated_s, {_NOW} AS now_s FROM account_rates "
    "WHERE account_id = :id FOR UPDATE"
)
_RUNNING = text(
    "SELECT COALESCE(SUM(num_running), 0) FROM account_running "
    f"WHERE account_id = :id AND seen_s > {_NOW} - {_DEAD_AFTER_S}"
)
_STORE_SQL = (
    "UPDATE account_rates SET requests = :requests, tokens = :tokens, updated_s = :updated_s "
    "WHERE account_id = :id"
)
_STORE = text(_STORE_SQL)
_STORE_AND_COUNT = text(
    f"WITH kept AS ({_STORE_SQL}) "
    f"INSERT INTO account_running VALUES (:id, :gateway_id, GREATEST(0, :change), {_NOW}) "
    "ON CONFLICT (account_id, gateway_id) DO UPDATE SET "
    f"num_running = GREATEST(0, account_running.num_running + :change), seen_s = {_NOW}"
)


class SharedRates:
    """The rates of every gateway on one PostgreSQL. Blocks; may be used from any thread."""

    blocks = True

    def __init__(self, database: Database, gateway_id: str) -> None:
        """Bring the tables up to date. `gateway_id` is of this process's life."""
        assert database.is_shared, "a file is not shared between hosts"
        self._database = database
        self._gateway_id = gateway_id
        database.migrate(MIGRATIONS)

    def take(self, account_id: str, limits: Limits, num_tokens: int) -> RateState:
        """Take one request of `num_tokens`, or nothing."""
        with self._database.write() as connection:
            levels, now_s = self._locked(connection, account_id, limits)
            state = levels.take(limits, num_tokens, now_s)
            self._store(connection, account_id, limits, levels, int(state.refused_by is None))
        return state

    def give_back(self, account_id: str, limits: Limits, num_tokens: int) -> None:
        """End a request."""
        with self._database.write() as connection:
            levels, now_s = self._locked(connection, account_id, limits)
            levels.give_back(limits, num_tokens, now_s)
            self._store(connection, account_id, limits, levels, -1)

    def heartbeat(self) -> None:
        """Say that this gateway lives; call it every HEARTBEAT_S."""
        with self._database.write() as connection:
            connection.execute(
                text(f"UPDATE account_running SET seen_s = {_NOW} WHERE gateway_id = :gateway_id"),
                {"gateway_id": self._gateway_id},
            )
            connection.execute(
                text(f"DELETE FROM account_running WHERE seen_s < {_NOW} - 100 * :dead_s"),
                {"dead_s": _DEAD_AFTER_S},
            )

    def leave(self) -> None:
        """Forget what this gateway runs, at its end."""
        with self._database.write() as connection:
            connection.execute(
                text("DELETE FROM account_running WHERE gateway_id = :gateway_id"),
                {"gateway_id": self._gateway_id},
            )

    def _locked(
        self, connection: Connection, account_id: str, limits: Limits
    ) -> tuple[Levels, float]:
        """Return the account's levels, which nobody else changes until the commit, and the time."""
        row = self._row(connection, account_id)
        if row is None:
            connection.execute(
                text(
                    f"INSERT INTO account_rates VALUES (:id, :requests, :tokens, {_NOW}) "
                    "ON CONFLICT DO NOTHING"
                ),
                {
                    "id": account_id,
                    "requests": float(limits.requests_per_minute or 0),
                    "tokens": float(limits.tokens_per_minute or 0),
                },
            )
            row = self._row(connection, account_id)
            assert row is not None
        running = 0
        if limits.concurrency is not None:
            # A statement of its own: one that waited for the lock still sees the time before it.
            running = int(connection.execute(_RUNNING, {"id": account_id}).scalar_one())
        return Levels(row.requests, row.tokens, row.updated_s, running), row.now_s

    def _row(self, connection: Connection, account_id: str) -> Row[tuple[object, ...]] | None:
        return connection.execute(text(_ROW), {"id": account_id}).first()

    def _store(
        self, connection: Connection, account_id: str, limits: Limits, levels: Levels, change: int
    ) -> None:
        """Keep the levels, and count `change` requests more of this gateway."""
        is_counted = limits.concurrency is not None and change != 0
        connection.execute(
            _STORE_AND_COUNT if is_counted else _STORE,
            {
                "id": account_id,
                "requests": levels.requests,
                "tokens": levels.tokens,
                "updated_s": levels.updated_s,
                **({"gateway_id": self._gateway_id, "change": change} if is_counted else {}),
            },
        )
