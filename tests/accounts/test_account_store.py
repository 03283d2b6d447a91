"""Accounts and tokens, the same on SQLite and on PostgreSQL."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import text

from twinfire.accounts.account_store import AccountStore
from twinfire.accounts.api_token import is_well_formed, new_token, token_digest
from twinfire.accounts.database import Database
from twinfire.accounts.limits import NO_LIMITS, Limits
from twinfire.protocol.errors import InvalidRequest

LIMITS = Limits(
    requests_per_minute=10,
    tokens_per_minute=10**12,
    concurrency=2,
    budget_tokens_per_day=5,
    budget_nanos_per_day=2**62,
    models=("a", "org/b"),
)


def test_accounts_come_back_as_they_were_made(
    database: Database, reopen: Callable[[], Database]
) -> None:
    store = AccountStore(database)
    made = store.create("Ünsere Firma", LIMITS, is_admin=True)
    plain = store.create("b", NO_LIMITS)
    again = AccountStore(reopen())
    assert again.find("Ünsere Firma") == again.find(made.id) == made
    assert again.list() == [plain, made] or again.list() == [made, plain]
    assert made.cache_salt != plain.cache_salt
    assert len(made.cache_salt) == 64
    assert made.cache_salt not in repr(made)


def test_limits_and_state_change(database: Database) -> None:
    store = AccountStore(database)
    account = store.create("a", NO_LIMITS)
    revisions = [store.revision()]
    assert store.set_limits("a", LIMITS) == replace(account, limits=LIMITS)
    revisions.append(store.revision())
    assert store.set_disabled(account.id, True).disabled
    revisions.append(store.revision())
    assert store.find("a") == replace(account, limits=LIMITS, disabled=True)
    assert store.set_limits("a", NO_LIMITS).limits == store.find("a").limits == NO_LIMITS
    revisions.append(store.revision())
    assert len(set(revisions)) == 4


def test_names_are_unique_and_readable(database: Database) -> None:
    store = AccountStore(database)
    store.create("a", NO_LIMITS)
    revision = store.revision()
    for name in ("a", "", " a", "a\n", "x" * 101, "open", "operator"):
        with pytest.raises(InvalidRequest):
            store.create(name, NO_LIMITS)
    with pytest.raises(InvalidRequest, match="no account `nobody`"):
        store.find("nobody")
    assert store.revision() == revision


def test_a_token_is_kept_as_its_digest_only(database: Database) -> None:
    store = AccountStore(database)
    account = store.create("a", NO_LIMITS)
    token, kept = store.create_token("a", "laptop", expires_s=time.time() + 60)
    assert is_well_formed(token)
    assert store.tokens("a") == [kept]
    snapshot = store.snapshot()
    assert snapshot.tokens == {token_digest(token): kept}
    assert snapshot.accounts == {account.id: account}
    with database.read() as connection:
        rows = connection.execute(text("SELECT * FROM api_tokens")).all()
    assert token not in str(rows)
    assert token[len("tf_") + 8 :] not in str(rows)


def test_a_revoked_token_is_gone_from_the_snapshot(database: Database) -> None:
    store = AccountStore(database)
    store.create("a", NO_LIMITS)
    first, kept = store.create_token("a")
    second, other = store.create_token("a")
    revision = store.revision()
    assert store.revoke_token(kept.shown_prefix).revoked_s is not None
    assert store.revision() > revision
    assert set(store.snapshot().tokens) == {token_digest(second)}
    assert token_digest(first) not in store.snapshot().tokens
    assert store.revoke_token(kept.id).id == kept.id
    for which in (kept.shown_prefix, "nothing"):
        with pytest.raises(InvalidRequest, match="no live token"):
            store.revoke_token(which)
    assert not store.tokens("a")[0].is_live(time.time())
    assert other.is_live(time.time())


@given(st.integers(0, 51), st.characters())
def test_a_token_with_any_other_character_is_no_token(position: int, character: str) -> None:
    token = new_token()
    changed = token[:position] + character + token[position + 1 :]
    assert is_well_formed(changed) == (changed == token)


@given(st.text())
def test_text_is_no_token(text: str) -> None:
    assert not is_well_formed(text)
    assert len(token_digest(text + "\ud800")) == 32


@pytest.mark.parametrize("value", [0, -1, 2**63])
def test_limits_that_make_no_sense(value: int) -> None:
    with pytest.raises(InvalidRequest, match="concurrency"):
        Limits(concurrency=value)
