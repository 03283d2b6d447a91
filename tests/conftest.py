"""Databases of both kinds: a fresh one for each test, one PostgreSQL server for the run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from support.postgres import postgres_programs, running_postgres
from twinfire.accounts.database import Database, open_database

_numbers = itertools.count()


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A PostgreSQL server for the whole run."""
    programs = postgres_programs()
    if programs is None:
        pytest.skip("there is no PostgreSQL on this machine")
    with running_postgres(programs) as url:
        yield url


@pytest.fixture
def postgres_database_url(postgres_url: str) -> str:
    """An empty database of the test's own."""
    name = f"test_{next(_numbers)}"
    admin = open_database(postgres_url)
    with admin._engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    admin.close()
    return postgres_url.replace("/postgres?", f"/{name}?")


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/state.db"
    return request.getfixturevalue("postgres_database_url")


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    opened = open_database(database_url)
    yield opened
    opened.close()


@pytest.fixture
def reopen(database_url: str) -> Iterator[Callable[[], Database]]:
    """Open the same database again, as another process would."""
    opened: list[Database] = []

    def again() -> Database:
        opened.append(open_database(database_url))
        return opened[-1]

    yield again
    for one in opened:
        one.close()
