from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from twinfire.accounts.database import Database
from twinfire.gateway.response_store import sql_store
from twinfire.gateway.response_store.sql_store import SqlResponseStore
from twinfire.gateway.response_store.stored_response import StoredResponse, StoreLimits


def stored(name: str, previous: str | None = None, root: str | None = None) -> StoredResponse:
    return StoredResponse(
        response_id=name,
        account_id="a",
        root_id=root or name,
        previous_id=previous,
        status="completed",
        is_background=False,
        created_s=1.5,
        response=b'{"text":"\\u0000"}',
        input_items=b"[]",
    )


@pytest.fixture
def store(database: Database) -> Iterator[SqlResponseStore]:
    store = SqlResponseStore(database)
    yield store
    store.close()


def test_what_is_saved_is_found(store: SqlResponseStore) -> None:
    async def go() -> None:
        first = replace(stored("r1"), events=bytes(range(256)), is_background=True)
        await store.save(first)
        assert await store.find("a", "r1") == first
        changed = replace(first, status="failed", response=b"{}", events=None)
        await store.save(changed)
        assert await store.find("a", "r1") == changed
        assert await store.delete("a", "r1")
        assert not await store.delete("a", "r1")
        assert await store.find("a", "r1") is None

    asyncio.run(go())


def test_accounts_do_not_see_each_other(store: SqlResponseStore) -> None:
    async def go() -> None:
        await store.save(stored("r1"))
        assert await store.find("b", "r1") is None
        assert not await store.conversation("b", "r1")
        assert not await store.delete("b", "r1")
        await store.ask_to_cancel("b", "r1")
        assert not await store.keep_alive(["r1"])
        assert await store.find("a", "r1") is not None

    asyncio.run(go())


def test_conversation_is_one_branch(store: SqlResponseStore) -> None:
    async def go() -> None:
        for one in (
            stored("r1"),
            stored("r2", "r1", "r1"),
            stored("other", "r1", "r1"),
            stored("r3", "r2", "r1"),
        ):
            await store.save(one)
        path = await store.conversation("a", "r3")
        assert [one.response_id for one in path] == ["r1", "r2", "r3"]
        await store.delete("a", "r2")
        path = await store.conversation("a", "r3")
        assert [one.response_id for one in path] == ["r3"]
        assert path[0].previous_id == "r2", "which tells that it is not whole"

    asyncio.run(go())


def test_the_longest_unused_go_first(database: Database) -> None:
    store = SqlResponseStore(database, StoreLimits(max_responses=3), saves_per_sweep=1)

    async def go() -> list[str]:
        await store.save(stored("r1"))
        await store.save(stored("r2"))
        await store.save(stored("r3", "r1", "r1"))
        await store.save(stored("r4"))
        names = ("r1", "r2", "r3", "r4")
        return [name for name in names if await store.find("a", name) is not None]

    assert asyncio.run(go()) == ["r1", "r3", "r4"]
    store.close()


def test_bytes_and_age_are_bounded(database: Database) -> None:
    limits = StoreLimits(max_bytes=250, max_age_s=0.5)
    store = SqlResponseStore(database, limits, saves_per_sweep=1)

    async def go() -> None:
        big = b'"' + b"x" * 98 + b'"'
        for name in ("r1", "r2", "r3"):
            await store.save(replace(stored(name), response=big))
        assert await store.find("a", "r1") is None
        assert await store.find("a", "r3") is not None
        time.sleep(0.51)
        await store.save(replace(stored("r4"), account_id="b"))
        assert await store.find("a", "r3") is None, "age is everybody's"

    asyncio.run(go())
    store.close()


def test_two_gateways_on_one_database(reopen: Callable[[], Database]) -> None:
    stores = [SqlResponseStore(reopen()) for _ in range(2)]

    async def go() -> None:
        one, other = stores
        await one.save(replace(stored("r1"), status="in_progress", is_background=True))
        assert not await one.keep_alive(["r1"])
        assert not await other.is_abandoned("r1")
        await other.ask_to_cancel("a", "r1")
        assert list(await one.keep_alive(["r1"])) == ["r1"]

    asyncio.run(go())
    for store in stores:
        store.close()


def test_response_that_nobody_runs_is_abandoned(
    store: SqlResponseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def go() -> None:
        await store.save(replace(stored("r1"), status="in_progress"))
        monkeypatch.setattr(sql_store, "_ABANDONED_AFTER_S", -1.0)
        assert await store.is_abandoned("r1")
        assert not await store.is_abandoned("never was")

    asyncio.run(go())
