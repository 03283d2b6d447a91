"""Batches in a real database: leases, results written once, ends, and whose they are."""

from __future__ import annotations

import threading

import pytest

from twinfire.accounts.database import Database
from twinfire.gateway.batches.batch import BatchLimits, ClaimedRequest, NewBatch, RequestOutcome
from twinfire.gateway.batches.batch_store import BatchStore
from twinfire.protocol.errors import Overloaded

DONE = RequestOutcome(True, b'{"response":"\xc3\xa9"}', 5, 2, 3)


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def store_of(database: Database, clock: Clock, owner: str = "one", **limits: object) -> BatchStore:
    store = BatchStore(database, owner, BatchLimits(**limits), clock)  # type: ignore[arg-type]
    store.migrate()
    return store


def batch(batch_id: str = "b", count: int = 3, account: str = "a", model: str = "m") -> NewBatch:
    bodies = tuple(b'{"prompt":"%d"}' % number for number in range(count))
    references = tuple(f"ref{number}" if number else None for number in range(count))
    return NewBatch(batch_id, account, model, bodies, references)


def status(store: BatchStore, batch_id: str = "b", account: str = "a") -> tuple[str, int]:
    state = store.state(batch_id, account)
    assert state is not None
    return state.status, state.num_finished


def test_a_batch_from_its_arrival_to_its_end(database: Database, clock: Clock) -> None:
    store = store_of(database, clock)
    store.add(batch())
    assert status(store) == ("queued", 0)
    claimed = store.claim(["m"], 2)
    assert [one.number for one in claimed] == [0, 1]
    assert claimed[0].body == b'{"prompt":"0"}'
    assert status(store) == ("running", 0)
    assert store.finish(claimed[1], DONE)
    assert not store.finish(claimed[1], DONE)
    assert store.finish(claimed[0], RequestOutcome(False, b"{}"))
    [last] = store.claim(["m"], 9)
    assert store.claim(["m"], 9) == []
    assert store.finish(last, DONE)
    assert status(store) == ("done", 3)
    finished = store.finished("b")
    assert [(one.number, one.reference) for one in finished] == [
        (0, None),
        (1, "ref1"),
        (2, "ref2"),
    ]
    assert [one.outcome.is_success for one in finished] == [False, True, True]
    assert finished[1].outcome == DONE
    assert store.num_open() == 0


def test_others_see_nothing_of_a_batch(database: Database, clock: Clock) -> None:
    store = store_of(database, clock)
    store.add(batch())
    assert store.state("b", "other") is None
    assert store.state("nothing", "a") is None
    assert store.claim(["other"], 9) == []
    assert store.claim([], 9) == []


def test_older_batches_come_first(database: Database, clock: Clock) -> None:
    store = store_of(database, clock)
    for name in ("z", "y"):
        store.add(batch(name, 2))
        clock.now_s += 1
    order = [one.key for one in store.claim(["m"], 9)]
    assert order == [("z", 0), ("z", 1), ("y", 0), ("y", 1)]


def test_a_lease_runs_out_unless_it_is_renewed(database: Database, clock: Clock) -> None:
    one, two = (store_of(database, clock, owner, lease_s=20.0) for owner in ("one", "two"))
    one.add(batch(count=2))
    kept, lost = one.claim(["m"], 2)
    clock.now_s += 15
    assert one.renew([kept.key]) == set()
    clock.now_s += 15
    assert [request.key for request in two.claim(["m"], 9)] == [lost.key]
    assert one.renew([kept.key, lost.key]) == {lost.key}
    # Whoever is first writes the result; what the other computed is dropped.
    assert one.finish(lost, DONE)
    assert not two.finish(lost, DONE)


def test_what_is_put_back_is_there_at_once(database: Database, clock: Clock) -> None:
    store = store_of(database, clock)
    store.add(batch(count=1))
    [first] = store.claim(["m"], 1)
    store.release(first, failed=False)
    [second] = store.claim(["m"], 1)
    assert second.num_attempts == 0
    store.release(second, failed=True)
    assert store.claim(["m"], 1)[0].num_attempts == 1


def test_a_cancelled_batch_ends_with_what_it_has(database: Database, clock: Clock) -> None:
    store = store_of(database, clock)
    store.add(batch())
    first, second = store.claim(["m"], 2)
    store.finish(first, DONE)
    store.cancel("b")
    assert status(store) == ("cancelled", 1)
    assert store.renew([second.key]) == {second.key}
    assert store.claim(["m"], 9) == []
    store.add(batch("whole", 1))
    store.finish(store.claim(["m"], 1)[0], DONE)
    store.cancel("whole")
    assert status(store, "whole") == ("done", 1)


def test_what_expires_gets_no_more_results_and_is_forgotten(
    database: Database, clock: Clock
) -> None:
    store = store_of(database, clock, expires_s=100.0, keep_results_s=50.0)
    store.add(batch())
    [first] = store.claim(["m"], 1)
    clock.now_s += 101
    assert status(store)[0] == "expired"
    assert store.claim(["m"], 9) == []
    assert store.renew([first.key]) == {first.key}
    store.remove_old()
    clock.now_s += 49
    store.remove_old()
    assert status(store)[0] == "expired"
    clock.now_s += 2
    store.remove_old()
    assert store.state("b", "a") is None
    assert store.finished("b") == []


def test_an_account_may_have_so_much_open(database: Database, clock: Clock) -> None:
    store = store_of(database, clock, max_open_requests=4)
    store.add(batch("x", 3))
    with pytest.raises(Overloaded, match="3 queued requests have no result yet; the limit is 4"):
        store.add(batch("y", 2))
    store.add(batch("y", 2, account="other"))
    store.finish(store.claim(["m"], 1)[0], DONE)
    store.add(batch("z", 2))


def test_many_owners_never_compute_one_request_twice(database: Database, clock: Clock) -> None:
    store_of(database, clock).add(batch(count=60))
    claimed: list[ClaimedRequest] = []

    def work(owner: str) -> None:
        store = BatchStore(database, owner, BatchLimits(), clock)
        while mine := store.claim(["m"], 3):
            claimed.extend(mine)
            for request in mine:
                assert store.finish(request, DONE)

    threads = [threading.Thread(target=work, args=(str(number),)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(one.number for one in claimed) == list(range(60))
    assert status(store_of(database, clock)) == ("done", 60)
