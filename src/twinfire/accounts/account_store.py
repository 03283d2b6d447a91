"""Accounts and their tokens in the database.

Every change counts `accounts_revision` up, so that a server which keeps all of it in memory finds
out by reading one number.
"""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
from sqlalchemy import Connection, Row, text
from sqlalchemy.exc import IntegrityError

from twinfire.accounts.account import OPEN_ACCOUNT, OPERATOR_ACCOUNT, Account
from twinfire.accounts.api_token import ApiToken, new_token, shown_prefix, token_digest
from twinfire.accounts.database import Database, Migration
from twinfire.accounts.limits import NUMERIC_LIMITS, Limits
from twinfire.protocol.errors import InvalidRequest

_MAX_NAME_CHARS = 100
_SALT_BYTES = 32

MIGRATIONS = (
    Migration(
        "accounts",
        1,
        (
            """CREATE TABLE accounts (
                id TEXT PRIMARY KEY,
                name TEXT NOT NULL UNIQUE,
                cache_salt TEXT NOT NULL,
                is_admin INTEGER NOT NULL,
                disabled INTEGER NOT NULL,
                created_s DOUBLE PRECISION NOT NULL,
                requests_per_minute BIGINT,
                tokens_per_minute BIGINT,
                concurrency BIGINT,
                budget_tokens_per_day BIGINT,
                budget_nanos_per_day BIGINT,
                models TEXT
            )""",
            """CREATE TABLE api_tokens (
                id TEXT PRIMARY KEY,
                account_id TEXT NOT NULL REFERENCES accounts (id),
                name TEXT NOT NULL,
                shown_prefix TEXT NOT NULL,
                digest TEXT NOT NULL UNIQUE,
                created_s DOUBLE PRECISION NOT NULL,
                expires_s DOUBLE PRECISION,
                revoked_s DOUBLE PRECISION
            )""",
            "CREATE INDEX api_tokens_of_account ON api_tokens (account_id)",
            "CREATE TABLE accounts_revision (revision BIGINT NOT NULL)",
            "INSERT INTO accounts_revision VALUES (0)",
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class AccountsSnapshot:
    """All accounts and every token that is not revoked, at one revision."""

    revision: int
    accounts: dict[str, Account]
    """By id."""
    tokens: dict[bytes, ApiToken]
    """By digest."""


class AccountStore:
    """The tables `accounts` and `api_tokens`."""

    def __init__(self, database: Database) -> None:
        """Bring the tables up to date."""
        self._database = database
        database.migrate(MIGRATIONS)

    def create(self, name: str, limits: Limits, *, is_admin: bool = False) -> Account:
        """Return a new account; InvalidRequest when the name is taken or no good."""
        _check_name(name)
        account = Account(
            id=uuid.uuid4().hex,
            name=name,
            cache_salt=secrets.token_hex(_SALT_BYTES),
            is_admin=is_admin,
            limits=limits,
            created_s=time.time(),
        )
        with self._database.write() as connection:
            _bump(connection)
            try:
                connection.execute(
                    text(
                        "INSERT INTO accounts VALUES (:id, :name, :cache_salt, :is_admin, 0, "
                        ":created_s, :requests_per_minute, :tokens_per_minute, :concurrency, "
                        ":budget_tokens_per_day, :budget_nanos_per_day, :models)"
                    ),
                    {
                        "id": account.id,
                        "name": name,
                        "cache_salt": account.cache_salt,
                        "is_admin": int(is_admin),
                        "created_s": account.created_s,
                        **_limit_columns(limits),
                    },
                )
            except IntegrityError:
                raise InvalidRequest(f"there is an account called `{name}` already") from None
        return account

    def list(self) -> list[Account]:
        """Return all accounts, by name."""
        with self._database.read() as connection:
            rows = connection.execute(text("SELECT * FROM accounts ORDER BY name"))
            return [_account(row) for row in rows]

    def find(self, name_or_id: str) -> Account:
        """Return one account; InvalidRequest when there is none."""
        with self._database.read() as connection:
            return _found(connection, name_or_id)

    def set_limits(self, name_or_id: str, limits: Limits) -> Account:
        """Give an account other limits."""
        columns = ", ".join(f"{name} = :{name}" for name in _limit_columns(limits))
        with self._database.write() as connection:
            account = _found(connection, name_or_id)
            _bump(connection)
            connection.execute(
                text(f"UPDATE accounts SET {columns} WHERE id = :id"),
                {"id": account.id, **_limit_columns(limits)},
            )
        return replace(account, limits=limits)

    def set_disabled(self, name_or_id: str, disabled: bool) -> Account:
        """Refuse all of an account's tokens, or take them again."""
        with self._database.write() as connection:
            account = _found(connection, name_or_id)
            _bump(connection)
            connection.execute(
                text("UPDATE accounts SET disabled = :disabled WHERE id = :id"),
                {"id": account.id, "disabled": int(disabled)},
            )
        return replace(account, disabled=disabled)

    def create_token(
        self, name_or_id: str, name: str = "", expires_s: float | None = None
    ) -> tuple[str, ApiToken]:
        """Return a new token and what is kept of it; nobody can be shown the former again."""
        if len(name) > _MAX_NAME_CHARS:
            raise InvalidRequest(f"a token's name has at most {_MAX_NAME_CHARS} characters")
        token = new_token()
        with self._database.write() as connection:
            account = _found(connection, name_or_id)
            _bump(connection)
            kept = ApiToken(
                id=uuid.uuid4().hex,
                account_id=account.id,
                name=name,
                shown_prefix=shown_prefix(token),
                created_s=time.time(),
                expires_s=expires_s,
            )
            connection.execute(
                text(
                    "INSERT INTO api_tokens VALUES (:id, :account_id, :name, :shown_prefix, "
                    ":digest, :created_s, :expires_s, NULL)"
                ),
                {
                    "id": kept.id,
                    "account_id": kept.account_id,
                    "name": name,
                    "shown_prefix": kept.shown_prefix,
                    "digest": token_digest(token).hex(),
                    "created_s": kept.created_s,
                    "expires_s": expires_s,
                },
            )
        return token, kept

    def tokens(self, name_or_id: str) -> Sequence[ApiToken]:
        """Return an account's tokens, the oldest first."""
        with self._database.read() as connection:
            account = _found(connection, name_or_id)
            rows = connection.execute(
                text("SELECT * FROM api_tokens WHERE account_id = :id ORDER BY created_s"),
                {"id": account.id},
            )
            return [_token(row) for row in rows]

    def revoke_token(self, which: str) -> ApiToken:
        """Revoke the token with the id `which`, or the only live one that is shown as `which`."""
        with self._database.write() as connection:
            rows = connection.execute(
                text(
                    "SELECT * FROM api_tokens "
                    "WHERE id = :which OR (shown_prefix = :which AND revoked_s IS NULL)"
                ),
                {"which": which},
            ).all()
            if len(rows) != 1:
                found = "several tokens are" if rows else "no live token is"
                raise InvalidRequest(f"{found} called `{which}`; give a token's id")
            token = _token(rows[0])
            if token.revoked_s is not None:
                return token
            _bump(connection)
            now_s = time.time()
            connection.execute(
                text("UPDATE api_tokens SET revoked_s = :now_s WHERE id = :id"),
                {"id": token.id, "now_s": now_s},
            )
        return replace(token, revoked_s=now_s)

    def revision(self) -> int:
        """Return a number that changes with every change of accounts and tokens."""
        with self._database.read() as connection:
            return _revision(connection)

    def snapshot(self) -> AccountsSnapshot:
        """Return everything that authentication needs."""
        with self._database.read() as connection:
            # Read first: a change in between is then seen as one, and everything is read again.
            revision = _revision(connection)
            accounts = [_account(row) for row in connection.execute(text("SELECT * FROM accounts"))]
            rows = connection.execute(text("SELECT * FROM api_tokens WHERE revoked_s IS NULL"))
            tokens = {bytes.fromhex(row.digest): _token(row) for row in rows}
        return AccountsSnapshot(revision, {account.id: account for account in accounts}, tokens)


def _check_name(name: str) -> None:
    if not 0 < len(name) <= _MAX_NAME_CHARS or not name.isprintable() or name != name.strip():
        raise InvalidRequest(
            f"an account's name has 1 to {_MAX_NAME_CHARS} printable characters, got {name!r}"
        )
    if name in (OPEN_ACCOUNT.name, OPERATOR_ACCOUNT.name):
        raise InvalidRequest(f"the name `{name}` is taken by the server itself")


def _limit_columns(limits: Limits) -> dict[str, int | str | None]:
    columns: dict[str, int | str | None] = {name: getattr(limits, name) for name in NUMERIC_LIMITS}
    models = limits.models
    columns["models"] = None if models is None else msgspec.json.encode(models).decode()
    return columns


def _found(connection: Connection, name_or_id: str) -> Account:
    row = connection.execute(
        text("SELECT * FROM accounts WHERE id = :key OR name = :key ORDER BY id = :key DESC"),
        {"key": name_or_id},
    ).first()
    if row is None:
        raise InvalidRequest(f"there is no account `{name_or_id}`")
    return _account(row)


def _account(row: Row[tuple[object, ...]]) -> Account:
    models = row.models
    numbers = {name: getattr(row, name) for name in NUMERIC_LIMITS}
    return Account(
        id=row.id,
        name=row.name,
        cache_salt=row.cache_salt,
        is_admin=bool(row.is_admin),
        disabled=bool(row.disabled),
        limits=Limits(
            **numbers, models=None if models is None else tuple(msgspec.json.decode(models))
        ),
        created_s=row.created_s,
    )


def _token(row: Row[tuple[object, ...]]) -> ApiToken:
    return ApiToken(
        id=row.id,
        account_id=row.account_id,
        name=row.name,
        shown_prefix=row.shown_prefix,
        created_s=row.created_s,
        expires_s=row.expires_s,
        revoked_s=row.revoked_s,
    )


def _revision(connection: Connection) -> int:
    return int(connection.execute(text("SELECT revision FROM accounts_revision")).scalar_one())


def _bump(connection: Connection) -> None:
    connection.execute(text("UPDATE accounts_revision SET revision = revision + 1"))
