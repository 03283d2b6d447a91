"""`twinfire accounts` on a real database, and who may call a server on which address."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from support.usage_records import record
from twinfire.accounts.account_store import AccountStore
from twinfire.accounts.api_token import token_digest
from twinfire.accounts.database import open_database
from twinfire.accounts.limits import Limits
from twinfire.accounts.usage_store import UsageStore
from twinfire.artifacts.env import Env
from twinfire.cli.access_options import AccessOptions
from twinfire.cli.main import main
from twinfire.protocol.errors import InvalidRequest


@pytest.fixture
def db(tmp_path: Path) -> str:
    return str(tmp_path / "accounts.db")


def test_an_account_from_its_making_to_its_end(db: str, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*words: str) -> str:
        head = 2 if words[0] == "token" else 1
        assert main(["accounts", *words[:head], "--accounts-db", db, *words[head:]]) == 0
        return capsys.readouterr().out

    run("create", "team", "--requests-per-minute", "60", "--budget-per-day", "2.50")
    store = AccountStore(open_database(db))
    account = store.find("team")
    assert account.limits == Limits(requests_per_minute=60, budget_nanos_per_day=2_500_000_000)
    run("limit", "team", "--requests-per-minute", "none", "--concurrency", "3", "--model", "m")
    assert store.find("team").limits == Limits(
        concurrency=3, budget_nanos_per_day=2_500_000_000, models=("m",)
    )
    run("limit", "team", "--model", "all")
    assert store.find("team").limits.models is None
    token = run("token", "create", "team", "--name", "laptop", "--days", "1").strip()
    assert token_digest(token) in store.snapshot().tokens
    UsageStore(open_database(db)).append([record("1", account_id=account.id)])
    shown = run("show", "team")
    assert token[:11] in shown
    assert token not in shown
    assert "3 requests at once; 2.5 a day" in shown
    assert "team" in run("list")
    assert "15" in run("usage", "--account", "team") or "10" in run("usage")
    rows = list(csv.reader(io.StringIO(run("usage", "--csv", "--by", "account"))))
    assert rows[1] == ["team", "1", "10", "4", "5", "0", "0.000000007 USD"]
    assert run("usage", "--since", "2030-01-01").count("\n") == 1
    run("token", "revoke", token[:11])
    assert store.snapshot().tokens == {}
    run("disable", "team")
    assert store.find("team").disabled
    run("enable", "team")
    assert not store.find("team").disabled


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["show", "nobody"], "no account `nobody`"),
        (["create", "a", "--budget-per-day", "lots"], "no amount of money"),
        (["create", "open"], "taken by the server"),
        (["create", "a", "--concurrency", "0"], "concurrency"),
        (["token", "create", "nobody"], "no account `nobody`"),
        (["token", "revoke", "tf_x"], "no live token"),
    ],
)
def test_mistakes_are_told(
    db: str, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    head = 2 if words[0] == "token" else 1
    assert main(["accounts", *words[:head], "--accounts-db", db, *words[head:]]) == 1
    assert told in capsys.readouterr().err


def test_who_may_call_a_server() -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        assert AccessOptions().mode(host) == "auto"
    for host in ("0.0.0.0", "::", "", "10.1.2.3", "example.org"):
        assert AccessOptions().mode(host) == "tokens"
        assert AccessOptions(is_open=True).mode(host) == "open"
    assert AccessOptions(needs_token=True).mode("127.0.0.1") == "tokens"
    with pytest.raises(InvalidRequest):
        AccessOptions(needs_token=True, is_open=True).mode("::1")
    with pytest.raises(InvalidRequest):
        _ = AccessOptions(tls_cert=Path("x")).tls


def test_the_database_is_in_the_users_data_folder() -> None:
    assert Env.read({"TWINFIRE_DATA": "/a"}).data_dir == Path("/a")
    assert Env.read({"XDG_DATA_HOME": "/b"}).data_dir == Path("/b/twinfire")
    assert AccessOptions(accounts_db="none").database is None
    assert AccessOptions(accounts_db="x.db").database == "x.db"
    assert (AccessOptions().database or "").endswith("twinfire.db")
