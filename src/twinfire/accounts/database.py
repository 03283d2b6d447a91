"""The database behind accounts and usage: SQLite in a file, or PostgreSQL by its URL.

Owns connections, transactions and migrations; knows no table but the one that lists the
migrations. Blocks: an event loop calls it from a thread. An error never shows a URL's password.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import sqlalchemy
from sqlalchemy import Connection, Engine, event, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

from twinfire.protocol.errors import InvalidRequest, TwinfireError

_BUSY_WAIT_S = 5.0
"""How long a statement waits for a lock that another process holds."""
_CONNECT_LIMIT_S = 5
_MIGRATION_LOCK = 0x7477696E
"""Any number that all of our processes agree on."""
_IDENTITY = {
    "sqlite": "INTEGER PRIMARY KEY AUTOINCREMENT",
    "postgresql": "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
}


class DatabaseUnavailable(TwinfireError):
    """The database cannot be reached, or did not do what it was asked."""


@dataclass(frozen=True, slots=True)
class Migration:
    """One change of a store's tables. Once released it never changes: a later one does."""

    store: str
    number: int
    """1 for the store's first."""
    statements: tuple[str, ...]
    """SQL for both databases; `{identity}` becomes the type of a key that counts up."""


class Database:
    """Connections to one database. May be used from any thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def is_shared(self) -> bool:
        """Whether gateways on several machines can use it at once."""
        return self._engine.dialect.name == "postgresql"

    @property
    def shown_url(self) -> str:
        """The URL without its password."""
        return self._engine.url.render_as_string(hide_password=True)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Give a connection to read from; DatabaseUnavailable when that fails."""
        with self._transaction("BEGIN") as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Give a transaction, committed at the end; DatabaseUnavailable when that fails."""
        # A SQLite transaction that reads before it writes cannot wait for another writer.
        with self._transaction("BEGIN IMMEDIATE") as connection:
            yield connection

    def migrate(self, migrations: Sequence[Migration]) -> None:
        """Apply those that have not been. Processes that start at once wait for each other."""
        with self.write() as connection:
            if self.is_shared:
                connection.execute(text("SELECT pg_advisory_xact_lock(:n)"), {"n": _MIGRATION_LOCK})
            connection.execute(
                text(
                    "CREATE TABLE IF NOT EXISTS schema_migrations (store TEXT NOT NULL, "
                    "number INTEGER NOT NULL, applied_s DOUBLE PRECISION NOT NULL, "
                    "PRIMARY KEY (store, number))"
                )
            )
            rows = connection.execute(text("SELECT store, number FROM schema_migrations"))
            applied = {(row.store, row.number) for row in rows}
            for migration in migrations:
                if (migration.store, migration.number) not in applied:
                    self._apply(migration, connection)

    def close(self) -> None:
        """Close idle connections."""
        self._engine.dispose()

    def _apply(self, migration: Migration, connection: Connection) -> None:
        identity = _IDENTITY[self._engine.dialect.name]
        for statement in migration.statements:
            connection.execute(text(statement.replace("{identity}", identity)))
        connection.execute(
            text("INSERT INTO schema_migrations VALUES (:store, :number, :applied_s)"),
            {"store": migration.store, "number": migration.number, "applied_s": time.time()},
        )

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[Connection]:
        try:
            with self._engine.connect() as connection:
                connection = connection.execution_options(twinfire_begin=begin)
                with connection.begin():
                    yield connection
        except DBAPIError as error:
            reason = str(error.orig).strip().splitlines()
            first = reason[0] if reason else type(error.orig).__name__
            raise DatabaseUnavailable(f"the database {self.shown_url}: {first}") from None


def open_database(url: str) -> Database:
    """Return the database at `url`: a file's path, `sqlite:///PATH` or `postgresql://...`.

    A SQLite file is made where there is none, readable by this user alone. InvalidRequest for an
    URL that makes no sense; nothing is connected yet.
    """
    parsed = _parsed(url)
    if parsed.get_backend_name() == "sqlite":
        return Database(_sqlite_engine(parsed))
    try:
        engine = sqlalchemy.create_engine(
            parsed.set(drivername="postgresql+psycopg"),
            pool_pre_ping=True,
            connect_args={"connect_timeout": _CONNECT_LIMIT_S},
        )
    except ModuleNotFoundError:
        raise InvalidRequest(
            "PostgreSQL needs psycopg: pip install 'twinfire[postgres]'", "accounts-db"
        ) from None
    return Database(engine)


def _parsed(url: str) -> URL:
    if "://" not in url:
        return URL.create("sqlite", database=str(Path(url).expanduser()))
    try:
        parsed = make_url(url.replace("postgres://", "postgresql://", 1))
        backend = parsed.get_backend_name()
    except (ArgumentError, NoSuchModuleError, ValueError):
        raise InvalidRequest("the database's URL cannot be read", "accounts-db") from None
    if backend not in _IDENTITY:
        raise InvalidRequest(
            f"`{backend}` databases are not known: give a file, sqlite:///PATH or "
            "postgresql://USER:PASSWORD@HOST/NAME",
            "accounts-db",
        )
    if backend == "sqlite" and not parsed.database:
        raise InvalidRequest("a SQLite URL needs a path: sqlite:///PATH", "accounts-db")
    return parsed


def _sqlite_engine(url: URL) -> Engine:
    path = Path(cast(str, url.database))
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    except OSError as error:
        raise InvalidRequest(f"cannot open {path}: {error.strerror}", "accounts-db") from None
    engine = sqlalchemy.create_engine(url, connect_args={"timeout": _BUSY_WAIT_S})

    @event.listens_for(engine, "connect")
    def set_up(connection: object, _: object) -> None:
        import sqlite3

        assert isinstance(connection, sqlite3.Connection)
        # Transactions begin where we say so, not where the driver guesses.
        connection.isolation_level = None
        connection.execute("PRAGMA journal_mode = WAL")
        # A commit is in the system's page cache, which the end of a process does not touch; only
        # a machine that loses power may lose the last ones, and never its order.
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA foreign_keys = ON")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        options = connection.get_execution_options()
        connection.exec_driver_sql(str(options.get("twinfire_begin", "BEGIN")))

    return engine
