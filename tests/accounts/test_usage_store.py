"""The ledger, the same on SQLite and on PostgreSQL."""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec
import pytest

from support.usage_records import NOON, record
from twinfire.accounts.database import Database, DatabaseUnavailable
from twinfire.accounts.usage_store import DaySpent, UsageFilter, UsageStore, UsageSum

DAY = "2026-11-30"


def test_records_come_back_as_they_were_written(
    database: Database, reopen: Callable[[], Database]
) -> None:
    store = UsageStore(database)
    whole = record("1", finish="stop,length", ttft_s=0.125, price_nanos=2**62, model="org/ü")
    failed = record("2", outcome="failed", status=503, ttft_s=None)
    store.append([whole, failed])
    assert [one for _, one in UsageStore(reopen()).page(UsageFilter(), 10)] == [failed, whole]


def test_pages_end_where_the_next_begins(database: Database) -> None:
    store = UsageStore(database)
    for number in range(7):
        store.append([record(str(number))])
    seen: list[str] = []
    before: int | None = None
    while page := store.page(UsageFilter(), 3, before):
        seen += [one.record_id for _, one in page]
        before = page[-1][0]
    assert seen == [str(number) for number in reversed(range(7))]


def test_filters(database: Database) -> None:
    store = UsageStore(database)
    store.append(
        [
            record("a", account_id="x", model="m"),
            record("b", account_id="x", model="n", started_s=NOON + 10),
            record("c", account_id="y", model="m", started_s=NOON + 20, outcome="cancelled"),
        ]
    )

    def ids(**fields: object) -> str:
        page = store.page(UsageFilter(**fields), 10)
        return "".join(one.record_id for _, one in page)

    assert ids() == "cba"
    assert ids(account_id="x") == "ba"
    assert ids(model="m") == "ca"
    assert ids(since_s=NOON + 10) == "cb"
    assert ids(until_s=NOON + 10) == "a"
    assert ids(outcome="cancelled", account_id="y") == "c"
    assert ids(account_id="x' OR '1'='1") == ""


def test_a_record_is_written_once_however_often_it_is_tried(database: Database) -> None:
    store = UsageStore(database)
    first, second = record("1"), record("2")
    store.append([first])
    with pytest.raises(DatabaseUnavailable):
        store.append([second, first])
    assert len(store.page(UsageFilter(), 10)) == 1
    spent = store.append([second, first], may_be_known=True)
    assert len(store.page(UsageFilter(), 10)) == 2
    assert spent == {("acc", DAY): DaySpent(30, 14)} == {("acc", DAY): store.spent("acc", DAY)}
    assert store.append([first], may_be_known=True) == {}


def test_days_add_up(database: Database) -> None:
    store = UsageStore(database)
    assert store.spent("acc", DAY) == DaySpent()
    midnight = NOON + 12 * 3600
    late = record("2", started_s=midnight)
    before = record("1", started_s=midnight - 0.001)
    spent = store.append([before, late, record("3", account_id="other")])
    assert spent == {
        ("acc", DAY): DaySpent(15, 7),
        ("acc", "2026-12-01"): DaySpent(15, 7),
        ("other", DAY): DaySpent(15, 7),
    }


def test_sums_by_group(database: Database) -> None:
    store = UsageStore(database)
    assert store.sums(UsageFilter()) == []
    store.append(
        [
            record("1", model="m"),
            record("2", model="m", outcome="failed", num_output_tokens=1),
            record("3", model="n", started_s=NOON + 86400, num_reasoning_tokens=2),
            record("4", model="n", account_id="other"),
        ]
    )
    one = UsageSum(
        currency="USD",
        num_requests=1,
        num_finished=1,
        num_input_tokens=10,
        num_cached_tokens=4,
        num_output_tokens=5,
        price_nanos=7,
    )

    def of(**changes: object) -> UsageSum:
        return msgspec.structs.replace(one, **changes)

    two = {"num_requests": 2, "num_input_tokens": 20, "num_cached_tokens": 8, "price_nanos": 14}
    assert store.sums(UsageFilter(account_id="acc"), ("day", "model")) == [
        of(**two, day=DAY, model="m", num_output_tokens=6),
        of(day="2026-12-01", model="n", num_reasoning_tokens=2),
    ]
    by_account = store.sums(UsageFilter(), ("account",))
    assert [(row.account, row.num_requests) for row in by_account] == [("acc", 3), ("other", 1)]
    assert store.sums(UsageFilter(model="n"))[0].num_requests == 2


def test_writers_of_several_gateways_lose_nothing(
    database: Database, reopen: Callable[[], Database]
) -> None:
    stores = [UsageStore(database), UsageStore(reopen())]

    def write(store: UsageStore, which: int) -> None:
        for number in range(15):
            accounts = ("a", "b") if which else ("b", "a")
            store.append([record(f"{which}-{number}-{a}", account_id=a) for a in accounts])

    threads = [
        threading.Thread(target=write, args=(store, which)) for which, store in enumerate(stores)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert stores[0].spent("a", DAY) == stores[1].spent("b", DAY) == DaySpent(450, 210)
    assert len(stores[0].page(UsageFilter(), 100)) == 60
