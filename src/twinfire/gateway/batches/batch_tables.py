"""The tables of batches, on SQLite and on PostgreSQL."""

from __future__ import annotations

from twinfire.accounts.database import Migration

MIGRATIONS = (
    Migration(
        "batches",
        1,
        (
            "CREATE TABLE batches ("
            "batch_id TEXT PRIMARY KEY, account_id TEXT NOT NULL, model TEXT NOT NULL, "
            "num_requests INTEGER NOT NULL, num_finished INTEGER NOT NULL, "
            "created_s DOUBLE PRECISION NOT NULL, expires_s DOUBLE PRECISION NOT NULL, "
            "ended_s DOUBLE PRECISION, cancelled INTEGER NOT NULL)",
            "CREATE INDEX batches_open ON batches (ended_s, created_s)",
            "CREATE TABLE batch_requests ("
            "batch_id TEXT NOT NULL REFERENCES batches ON DELETE CASCADE, "
            "number INTEGER NOT NULL, body TEXT NOT NULL, reference TEXT, "
            "owner TEXT, leased_until_s DOUBLE PRECISION NOT NULL, num_attempts INTEGER NOT NULL, "
            "is_success INTEGER, result TEXT, num_prompt_tokens INTEGER, "
            "num_cached_tokens INTEGER, num_output_tokens INTEGER, "
            "PRIMARY KEY (batch_id, number))",
            "CREATE INDEX batch_requests_open ON batch_requests (is_success, leased_until_s)",
        ),
    ),
)
