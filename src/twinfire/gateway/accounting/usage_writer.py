"""Commits usage records: one thread, one transaction for everything that waits.

A record that is waited for is either committed or its waiter fails; one that nobody waits for, or
nobody any more, is tried until it is too old and then told to the log, from where it can be booked
by hand. One record is given to it once: its id may not be twice in a transaction.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from twinfire.accounts.database import DatabaseUnavailable
from twinfire.accounts.usage_record import UsageRecord
from twinfire.accounts.usage_store import DaySpent, UsageStore

_MAX_BATCH = 512
_FIRST_RETRY_S = 0.05
_LONGEST_RETRY_S = 2.0
_WAITED_LIMIT_S = 10.0
"""A client's last event waits so long for the database at most."""
_UNWAITED_LIMIT_S = 300.0

Spent = Mapping[tuple[str, str], DaySpent]
log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Pending:
    record: UsageRecord
    give_up_s: float
    waiter: asyncio.Future[None] | None


class UsageWriter:
    """Owns the thread. `on_spent` is called on the event loop with what accounts have spent."""

    def __init__(self, store: UsageStore, on_spent: Callable[[Spent], None]) -> None:
        self._store = store
        self._on_spent = on_spent
        self._loop = asyncio.get_running_loop()
        self._pending: list[_Pending] = []
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="twinfire-usage", daemon=True)
        self._thread.start()

    async def commit(self, record: UsageRecord) -> None:
        """Return once the record is committed; DatabaseUnavailable when it cannot be.

        Who is cancelled while waiting has submitted the record all the same.
        """
        waiter = self._loop.create_future()
        pending = _Pending(record, time.monotonic() + _WAITED_LIMIT_S, waiter)
        self._put(pending)
        try:
            await waiter
        except asyncio.CancelledError:
            pending.waiter = None
            pending.give_up_s = time.monotonic() + _UNWAITED_LIMIT_S
            raise

    def submit(self, record: UsageRecord) -> None:
        """Have the record committed soon."""
        self._put(_Pending(record, time.monotonic() + _UNWAITED_LIMIT_S, None))

    async def close(self) -> None:
        """Commit what is left and end the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    def _put(self, pending: _Pending) -> None:
        with self._wake:
            self._pending.append(pending)
            self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._pending and not self._closing:
                    self._wake.wait()
                batch, self._pending = self._pending[:_MAX_BATCH], self._pending[_MAX_BATCH:]
            if not batch:
                return
            self._commit(batch)

    def _commit(self, batch: list[_Pending]) -> None:
        retry_s = _FIRST_RETRY_S
        is_first = True
        while batch:
            try:
                records = [one.record for one in batch]
                spent = self._store.append(records, may_be_known=not is_first)
            except DatabaseUnavailable as error:
                batch = self._without_old(batch, error)
                is_first = False
                time.sleep(retry_s)
                retry_s = min(2 * retry_s, _LONGEST_RETRY_S)
            else:
                self._on_loop(self._committed, batch, spent)
                return

    def _without_old(self, batch: list[_Pending], error: DatabaseUnavailable) -> list[_Pending]:
        now_s = time.monotonic()
        # At the end nobody is left who could wait for a better time.
        keeps = [one for one in batch if now_s < one.give_up_s and not self._closing]
        for one in batch:
            if one in keeps:
                continue
            if one.waiter is None:
                shown = msgspec.json.encode(one.record).decode()
                log.error("a usage record is lost: %s: %s", error, shown)
            else:
                self._on_loop(self._fail, one, error)
        return keeps

    def _committed(self, batch: list[_Pending], spent: Spent) -> None:
        self._on_spent(spent)
        for one in batch:
            if one.waiter is not None and not one.waiter.done():
                one.waiter.set_result(None)

    def _fail(self, one: _Pending, error: DatabaseUnavailable) -> None:
        if one.waiter is None:
            # It was given up for its waiter, who had left by then.
            self.submit(one.record)
        elif not one.waiter.done():
            one.waiter.set_exception(error)

    def _on_loop(self, call: Callable[..., None], *args: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *args)
