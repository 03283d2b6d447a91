"""The queue of one gateway: its store, called from threads, and what computes the requests."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable

from twinfire.accounts.database import Database
from twinfire.gateway.batches.batch import BatchLimits, BatchState, FinishedRequest, NewBatch
from twinfire.gateway.batches.batch_runner import Answerer, BatchRunner
from twinfire.gateway.batches.batch_store import BatchStore
from twinfire.gateway.batches.spare_capacity import SpareCapacity
from twinfire.gateway.hosted_model import HostedModels


class Batches:
    """Belongs to the event loop's thread."""

    def __init__(
        self,
        models: HostedModels,
        database: Database,
        answerer: Answerer,
        num_served: Callable[[], int],
        limits: BatchLimits | None = None,
    ) -> None:
        """`num_served` is the number of requests here that somebody waits for."""
        self.limits = limits or BatchLimits()
        self._store = BatchStore(database, uuid.uuid4().hex, self.limits)
        capacity = SpareCapacity(self.limits, num_served)
        self._runner = BatchRunner(models, self._store, capacity, answerer, self.limits)

    @property
    def num_running(self) -> int:
        """Queued requests that are computed now."""
        return self._runner.num_running

    async def start(self) -> None:
        """Make the tables and begin; DatabaseUnavailable when that fails."""
        await asyncio.to_thread(self._store.migrate)
        self._runner.start()

    async def stop(self) -> None:
        """Put back what runs, and end."""
        await self._runner.stop()

    async def add(self, batch: NewBatch) -> None:
        """Take in a batch; Overloaded when its account has too much open."""
        await asyncio.to_thread(self._store.add, batch)
        self._runner.wake()

    async def state(self, batch_id: str, account_id: str) -> BatchState | None:
        """Return a batch of an account, None where the account has none of that id."""
        return await asyncio.to_thread(self._store.state, batch_id, account_id)

    async def finished(self, batch_id: str) -> list[FinishedRequest]:
        """Return the requests of a batch that have a result, in order."""
        return await asyncio.to_thread(self._store.finished, batch_id)

    async def cancel(self, batch_id: str) -> None:
        """End a batch, unless it has ended."""
        await asyncio.to_thread(self._store.cancel, batch_id)
