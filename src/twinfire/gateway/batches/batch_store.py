"""Batches in the database. Blocks: an event loop calls it from a thread.

Several gateways may share one database: a request is leased to the one that computes it, and falls
to another when that one is not heard of any more. A result is written once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from sqlalchemy import Connection, RowMapping, text

from twinfire.accounts.database import Database
from twinfire.gateway.batches.batch import (
    BatchLimits,
    BatchState,
    BatchStatus,
    ClaimedRequest,
    FinishedRequest,
    NewBatch,
    RequestOutcome,
)
from twinfire.gateway.batches.batch_tables import MIGRATIONS
from twinfire.protocol.errors import Overloaded


class BatchStore:
    """The tables. `owner` names this gateway's life."""

    def __init__(
        self,
        database: Database,
        owner: str,
        limits: BatchLimits,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock` gives Unix time, which the gateways of one database must agree on."""
        self._database = database
        self._owner = owner
        self._limits = limits
        self._clock = clock

    def migrate(self) -> None:
        """Make the tables."""
        self._database.migrate(MIGRATIONS)

    def add(self, batch: NewBatch) -> None:
        """Keep a new batch; Overloaded when the account has too much open already."""
        now_s = self._clock()
        with self._database.write() as connection:
            self._check_room(connection, batch)
            connection.execute(
                text(
                    "INSERT INTO batches VALUES (:batch_id, :account_id, :model, :count, 0, :now, "
                    ":expires, NULL, 0)"
                ),
                {
                    "batch_id": batch.batch_id,
                    "account_id": batch.account_id,
                    "model": batch.model,
                    "count": len(batch.bodies),
                    "now": now_s,
                    "expires": now_s + self._limits.expires_s,
                },
            )
            connection.execute(
                text(
                    "INSERT INTO batch_requests (batch_id, number, body, reference, "
                    "leased_until_s, num_attempts) "
                    "VALUES (:batch_id, :number, :body, :reference, 0, 0)"
                ),
                [
                    {
                        "batch_id": batch.batch_id,
                        "number": number,
                        "body": body.decode(),
                        "reference": reference,
                    }
                    for number, (body, reference) in enumerate(
                        zip(batch.bodies, batch.references, strict=True)
                    )
                ],
            )

    def state(self, batch_id: str, account_id: str) -> BatchState | None:
        """Return a batch of an account, None where the account has none of that id."""
        with self._database.read() as connection:
            row = (
                connection.execute(
                    text("SELECT * FROM batches WHERE batch_id = :id AND account_id = :account"),
                    {"id": batch_id, "account": account_id},
                )
                .mappings()
                .first()
            )
            if row is None:
                return None
            is_leased = connection.execute(
                text(
                    "SELECT 1 FROM batch_requests WHERE batch_id = :id AND owner IS NOT NULL "
                    "LIMIT 1"
                ),
                {"id": batch_id},
            ).first()
        status = _status(row, self._clock(), has_begun=is_leased is not None)
        return BatchState(batch_id, row["model"], status, row["num_requests"], row["num_finished"])

    def finished(self, batch_id: str) -> list[FinishedRequest]:
        """Return the requests that have a result, in order."""
        with self._database.read() as connection:
            rows = (
                connection.execute(
                    text(
                        "SELECT * FROM batch_requests WHERE batch_id = :id "
                        "AND is_success IS NOT NULL ORDER BY number"
                    ),
                    {"id": batch_id},
                )
                .mappings()
                .all()
            )
        return [
            FinishedRequest(
                row["number"],
                row["reference"],
                RequestOutcome(
                    bool(row["is_success"]),
                    row["result"].encode(),
                    row["num_prompt_tokens"],
                    row["num_cached_tokens"],
                    row["num_output_tokens"],
                ),
            )
            for row in rows
        ]

    def cancel(self, batch_id: str) -> None:
        """End a batch, unless it has ended: what has no result gets none."""
        with self._database.write() as connection:
            connection.execute(
                text(
                    "UPDATE batches SET cancelled = 1, ended_s = :now "
                    "WHERE batch_id = :id AND ended_s IS NULL"
                ),
                {"id": batch_id, "now": self._clock()},
            )

    def claim(self, models: Sequence[str], count: int) -> list[ClaimedRequest]:
        """Lease up to `count` requests for any of `models` that nobody computes, oldest first."""
        now_s = self._clock()
        names = {f"model{index}": name for index, name in enumerate(models)}
        if not names or count < 1:
            return []
        with self._database.write() as connection:
            rows = (
                connection.execute(
                    text(
                        "SELECT r.*, b.account_id, b.model FROM batch_requests r "
                        "JOIN batches b ON b.batch_id = r.batch_id "
                        "WHERE r.is_success IS NULL AND r.leased_until_s < :now "
                        "AND b.ended_s IS NULL AND b.expires_s > :now "
                        f"AND b.model IN ({', '.join(':' + name for name in names)}) "
                        "ORDER BY b.created_s, r.number LIMIT :count" + self._skip_locked()
                    ),
                    {"now": now_s, "count": count, **names},
                )
                .mappings()
                .all()
            )
            for row in rows:
                self._lease(connection, row["batch_id"], row["number"], now_s)
        return [
            ClaimedRequest(
                row["batch_id"],
                row["account_id"],
                row["model"],
                row["number"],
                row["body"].encode(),
                row["num_attempts"],
            )
            for row in rows
        ]

    def renew(self, keys: Sequence[tuple[str, int]]) -> set[tuple[str, int]]:
        """Keep the leases of requests; return those that need not be computed any more."""
        now_s = self._clock()
        unwanted: set[tuple[str, int]] = set()
        with self._database.write() as connection:
            for batch_id, number in keys:
                wanted = connection.execute(
                    text(
                        "SELECT 1 FROM batch_requests r JOIN batches b ON b.batch_id = r.batch_id "
                        "WHERE r.batch_id = :id AND r.number = :number AND r.owner = :owner "
                        "AND r.is_success IS NULL AND b.ended_s IS NULL AND b.expires_s > :now"
                    ),
                    {"id": batch_id, "number": number, "owner": self._owner, "now": now_s},
                ).first()
                if wanted is None:
                    unwanted.add((batch_id, number))
                else:
                    self._lease(connection, batch_id, number, now_s)
        return unwanted

    def release(self, request: ClaimedRequest, *, failed: bool, wait_s: float = 0.0) -> None:
        """Leave a request to whoever has room for it, after `wait_s`.

        `failed` counts as an attempt.
        """
        with self._database.write() as connection:
            connection.execute(
                text(
                    "UPDATE batch_requests SET leased_until_s = :until, "
                    "num_attempts = num_attempts + :failed "
                    "WHERE batch_id = :id AND number = :number AND owner = :owner"
                ),
                {
                    "id": request.batch_id,
                    "number": request.number,
                    "owner": self._owner,
                    "failed": int(failed),
                    "until": self._clock() + wait_s if wait_s > 0 else 0.0,
                },
            )

    def finish(self, request: ClaimedRequest, outcome: RequestOutcome) -> bool:
        """Keep what became of a request; False where it has a result or is not wanted any more."""
        with self._database.write() as connection:
            done = connection.execute(
                text(
                    "UPDATE batch_requests SET is_success = :success, result = :result, "
                    "num_prompt_tokens = :prompt, num_cached_tokens = :cached, "
                    "num_output_tokens = :output WHERE batch_id = :id AND number = :number "
                    "AND is_success IS NULL"
                ),
                {
                    "id": request.batch_id,
                    "number": request.number,
                    "success": int(outcome.is_success),
                    "result": outcome.result.decode(),
                    "prompt": outcome.num_prompt_tokens,
                    "cached": outcome.num_cached_tokens,
                    "output": outcome.num_output_tokens,
                },
            )
            if not done.rowcount:
                return False
            connection.execute(
                text(
                    "UPDATE batches SET num_finished = num_finished + 1, "
                    "ended_s = CASE WHEN num_finished + 1 = num_requests AND ended_s IS NULL "
                    "THEN CAST(:now AS DOUBLE PRECISION) ELSE ended_s END WHERE batch_id = :id"
                ),
                {"id": request.batch_id, "now": self._clock()},
            )
        return True

    def remove_old(self) -> None:
        """End what has expired, and forget what ended long ago."""
        now_s = self._clock()
        with self._database.write() as connection:
            connection.execute(
                text(
                    "UPDATE batches SET ended_s = expires_s WHERE ended_s IS NULL "
                    "AND expires_s <= :now"
                ),
                {"now": now_s},
            )
            connection.execute(
                text("DELETE FROM batches WHERE ended_s < :before"),
                {"before": now_s - self._limits.keep_results_s},
            )

    def num_open(self) -> int:
        """Return how many requests wait for a result or are computed."""
        with self._database.read() as connection:
            row = (
                connection.execute(
                    text(
                        "SELECT SUM(num_requests - num_finished) AS open FROM batches "
                        "WHERE ended_s IS NULL AND expires_s > :now"
                    ),
                    {"now": self._clock()},
                )
                .mappings()
                .one()
            )
        return int(row["open"] or 0)

    def _check_room(self, connection: Connection, batch: NewBatch) -> None:
        row = (
            connection.execute(
                text(
                    "SELECT SUM(num_requests - num_finished) AS open FROM batches "
                    "WHERE account_id = :account AND ended_s IS NULL"
                ),
                {"account": batch.account_id},
            )
            .mappings()
            .one()
        )
        num_open = int(row["open"] or 0)
        limit = self._limits.max_open_requests
        if num_open + len(batch.bodies) > limit:
            raise Overloaded(
                f"{num_open} queued requests have no result yet; the limit is {limit}", 60.0
            )

    def _lease(self, connection: Connection, batch_id: str, number: int, now_s: float) -> None:
        connection.execute(
            text(
                "UPDATE batch_requests SET owner = :owner, leased_until_s = :until "
                "WHERE batch_id = :id AND number = :number"
            ),
            {
                "owner": self._owner,
                "until": now_s + self._limits.lease_s,
                "id": batch_id,
                "number": number,
            },
        )

    def _skip_locked(self) -> str:
        return " FOR UPDATE OF r SKIP LOCKED" if self._database.is_shared else ""


def _status(row: RowMapping, now_s: float, *, has_begun: bool) -> BatchStatus:
    if row["num_finished"] == row["num_requests"]:
        return "done"
    if row["cancelled"]:
        return "cancelled"
    if row["expires_s"] <= now_s:
        return "expired"
    return "running" if has_begun else "queued"
