"""Opening, migrating and failing, the same on SQLite and on PostgreSQL."""

from __future__ import annotations

import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import text

from twinfire.accounts.account_store import AccountStore
from twinfire.accounts.database import (
    Database,
    DatabaseUnavailable,
    Migration,
    open_database,
)
from twinfire.accounts.limits import NO_LIMITS
from twinfire.accounts.usage_store import UsageStore
from twinfire.protocol.errors import InvalidRequest

FIRST = Migration("pets", 1, ("CREATE TABLE pets (id {identity}, name TEXT)",))
SECOND = Migration("pets", 2, ("ALTER TABLE pets ADD COLUMN age BIGINT",))
BROKEN = Migration("pets", 3, ("INSERT INTO pets (name) VALUES ('a')", "DROP TABLE nowhere"))


def test_migrations_run_once_and_in_order(
    database: Database, reopen: Callable[[], Database]
) -> None:
    database.migrate((FIRST,))
    reopen().migrate((FIRST, SECOND))
    again = reopen()
    again.migrate((FIRST, SECOND))
    with again.write() as connection:
        connection.execute(text("INSERT INTO pets (name, age) VALUES ('a', 1), ('b', 2)"))
    with database.read() as connection:
        assert connection.execute(text("SELECT id FROM pets ORDER BY id")).scalars().all() == [1, 2]


def test_a_migration_that_fails_leaves_nothing(database: Database) -> None:
    database.migrate((FIRST,))
    with pytest.raises(DatabaseUnavailable, match="nowhere"):
        database.migrate((FIRST, BROKEN))
    with database.read() as connection:
        assert connection.execute(text("SELECT COUNT(*) FROM pets")).scalar_one() == 0
        applied = connection.execute(text("SELECT number FROM schema_migrations")).scalars().all()
    assert applied == [1]


def test_a_transaction_that_raises_is_rolled_back(database: Database) -> None:
    database.migrate((FIRST,))

    def write() -> None:
        with database.write() as connection:
            connection.execute(text("INSERT INTO pets (name) VALUES ('a')"))
            raise KeyError

    with pytest.raises(KeyError):
        write()
    with database.read() as connection:
        assert connection.execute(text("SELECT COUNT(*) FROM pets")).scalar_one() == 0


def test_processes_that_start_at_once_migrate_once(database_url: str) -> None:
    program = (
        "import sys; from twinfire.accounts.database import open_database;"
        "from twinfire.accounts.account_store import AccountStore;"
        "from twinfire.accounts.usage_store import UsageStore;"
        "database = open_database(sys.argv[1]); AccountStore(database); UsageStore(database)"
    )
    words = [sys.executable, "-c", program, database_url]
    processes = [subprocess.Popen(words, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    for process in processes:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    database = open_database(database_url)
    with database.read() as connection:
        rows = connection.execute(text("SELECT store, number FROM schema_migrations ORDER BY 1"))
        assert [tuple(row) for row in rows] == [("accounts", 1), ("usage", 1)]
    database.close()


def test_writers_wait_for_each_other(database: Database, reopen: Callable[[], Database]) -> None:
    database.migrate((FIRST,))

    def write(own: Database) -> None:
        for _ in range(20):
            with own.write() as connection:
                count = connection.execute(text("SELECT COUNT(*) FROM pets")).scalar_one()
                connection.execute(text("INSERT INTO pets (name) VALUES (:n)"), {"n": str(count)})

    threads = [threading.Thread(target=write, args=(one,)) for one in (database, reopen())]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    with database.read() as connection:
        assert connection.execute(text("SELECT COUNT(*) FROM pets")).scalar_one() == 40


def test_a_new_sqlite_file_is_for_this_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "accounts.db"
    database = open_database(str(path))
    AccountStore(database).create("a", NO_LIMITS)
    database.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "url", ["mysql://a/b", "nonsense://x", "sqlite://", "postgresql://host:port/x"]
)
def test_urls_that_make_no_sense(url: str) -> None:
    with pytest.raises(InvalidRequest):
        open_database(url)


def test_a_server_that_is_not_there_is_named_without_its_password() -> None:
    database = open_database("postgres://me:geheim@127.0.0.1:1/none")
    with pytest.raises(DatabaseUnavailable, match=r"127\.0\.0\.1") as fault:
        UsageStore(database)
    assert "geheim" not in str(fault.value)
