"""`twinfire accounts`: accounts, tokens, limits and usage in a server's database.

Works on the database itself, so that it needs no server; running ones see changes in two seconds.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from twinfire.cli.access_options import NO_DATABASE, add_database_argument, default_database
from twinfire.cli.text_table import text_table
from twinfire.protocol.errors import InvalidRequest

if TYPE_CHECKING:
    from twinfire.accounts.account import Account
    from twinfire.accounts.account_store import AccountStore
    from twinfire.accounts.database import Database
    from twinfire.accounts.limits import Limits
    from twinfire.accounts.usage_store import UsageStore

_LIMIT_OPTIONS = {
    "requests_per_minute": "requests a minute",
    "tokens_per_minute": "prompt and output tokens a minute",
    "concurrency": "requests at once",
    "budget_tokens_per_day": "tokens a day (of UTC)",
}
_NO_LIMIT = "none"
_S_PER_DAY = 86400.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    parser = subparsers.add_parser(
        "accounts", help="accounts, API tokens, limits and usage", description=__doc__
    )
    commands = parser.add_subparsers(metavar="ACTION", required=True)

    def add(
        to: argparse._SubParsersAction[argparse.ArgumentParser],
        name: str,
        run: Callable[[argparse.Namespace], int],
        text: str,
        *positionals: str,
    ) -> argparse.ArgumentParser:
        one = to.add_parser(name, help=text, description=text)
        add_database_argument(one)
        for positional in positionals:
            one.add_argument(positional, metavar=positional.upper())
        one.set_defaults(run=run)
        return one

    create = add(commands, "create", _create, "make an account", "name")
    create.add_argument("--admin", action="store_true", help="it sees everybody's usage")
    _add_limits(create)
    add(commands, "list", _list, "list all accounts")
    add(commands, "show", _show, "show an account and its tokens", "account")
    limit = add(commands, "limit", _limit, "change limits; what is not named stays", "account")
    _add_limits(limit)
    add(commands, "disable", _disable, "refuse all of an account's tokens", "account")
    add(commands, "enable", _enable, "take them again", "account")
    token = commands.add_parser("token", help="create and revoke tokens")
    tokens = token.add_subparsers(metavar="ACTION", required=True)
    made = add(tokens, "create", _create_token, "make a token and show it, once", "account")
    made.add_argument("--name", default="", help="what it is for")
    made.add_argument("--days", type=float, help="how long it is good (default: for ever)")
    add(tokens, "revoke", _revoke, "revoke a token by its id or the start that is shown", "token")
    usage = add(commands, "usage", _usage, "show what was used")
    usage.add_argument("--account", metavar="ACCOUNT")
    usage.add_argument("--model", metavar="NAME")
    usage.add_argument("--since", type=_day_s, metavar="YYYY-MM-DD", help="first day of UTC")
    usage.add_argument("--until", type=_day_s, metavar="YYYY-MM-DD", help="first day that is out")
    usage.add_argument(
        "--by",
        action="append",
        choices=["day", "model", "account"],
        help="group by it, repeatable (default: day and account)",
    )
    usage.add_argument("--csv", action="store_true", help="write CSV")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    for name, text in _LIMIT_OPTIONS.items():
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=_count, metavar="N", help=f"{text}; `none` for no limit")
    parser.add_argument(
        "--budget-per-day", metavar="MONEY", help="such as 2.50, in the price table's currency"
    )
    parser.add_argument(
        "--model", action="append", metavar="NAME", help="may be used, repeatable; `all` for all"
    )


def _count(text: str) -> int | str:
    return text if text == _NO_LIMIT else int(text)


def _day_s(text: str) -> float:
    try:
        return datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise argparse.ArgumentTypeError(f"`{text}` is no day: write YYYY-MM-DD") from None


def _create(args: argparse.Namespace) -> int:
    from twinfire.accounts.limits import NO_LIMITS

    account = _accounts(args).create(
        args.name, _changed_limits(NO_LIMITS, args), is_admin=args.admin
    )
    print(f"{account.name}  {account.id}")
    return 0


def _list(args: argparse.Namespace) -> int:
    rows = [
        (one.name, one.id, _state(one.disabled, one.is_admin), _shown_limits(one.limits))
        for one in _accounts(args).list()
    ]
    print(text_table(("name", "id", "state", "limits"), rows))
    return 0


def _show(args: argparse.Namespace) -> int:
    from twinfire.accounts.usage_record import utc_day

    store = _accounts(args)
    account = store.find(args.account)
    spent = _usage_store(args).spent(account.id, utc_day(time.time()))
    print(f"{account.name}  {account.id}  {_state(account.disabled, account.is_admin)}")
    print(f"made: {_shown_time(account.created_s)}")
    print(f"limits: {_shown_limits(account.limits)}")
    print(f"today: {spent.num_tokens} tokens, {_money(spent.price_nanos)}")
    now_s = time.time()
    rows = [
        (
            f"{token.shown_prefix}…",
            token.id,
            token.name,
            "live" if token.is_live(now_s) else "revoked" if token.revoked_s else "expired",
            _shown_time(token.created_s),
            "never" if token.expires_s is None else _shown_time(token.expires_s),
        )
        for token in store.tokens(account.id)
    ]
    print(text_table(("token", "id", "name", "state", "made", "ends"), rows))
    return 0


def _limit(args: argparse.Namespace) -> int:
    store = _accounts(args)
    account = store.find(args.account)
    changed = store.set_limits(account.id, _changed_limits(account.limits, args))
    print(f"{changed.name}: {_shown_limits(changed.limits)}")
    return 0


def _disable(args: argparse.Namespace) -> int:
    print(f"{_accounts(args).set_disabled(args.account, True).name} is disabled")
    return 0


def _enable(args: argparse.Namespace) -> int:
    print(f"{_accounts(args).set_disabled(args.account, False).name} is enabled")
    return 0


def _create_token(args: argparse.Namespace) -> int:
    if args.days is not None and not args.days > 0:
        raise InvalidRequest(f"--days is {args.days}; it must be above 0", "days")
    expires_s = None if args.days is None else time.time() + args.days * _S_PER_DAY
    token, kept = _accounts(args).create_token(args.account, args.name, expires_s)
    print(token)
    print(f"This is token {kept.id}. It is shown this once only.", file=sys.stderr)
    return 0


def _revoke(args: argparse.Namespace) -> int:
    token = _accounts(args).revoke_token(args.token)
    print(f"{token.shown_prefix}… ({token.id}) is revoked")
    return 0


def _usage(args: argparse.Namespace) -> int:
    from twinfire.accounts.usage_store import UsageFilter

    accounts = _accounts(args)
    account_id = None
    if args.account is not None:
        account_id = _known_account(accounts.list(), args.account)
    groups = args.by or ["day", "account"]
    which = UsageFilter(account_id, args.model, args.since, args.until)
    sums = _usage_store(args).sums(which, groups)
    names = {one.id: one.name for one in accounts.list()}
    header = (*groups, "requests", "input", "cached", "output", "reasoning", "price")
    rows = [
        (
            *(names.get(key, key) for key in (getattr(one, group) or "" for group in groups)),
            str(one.num_requests),
            str(one.num_input_tokens),
            str(one.num_cached_tokens),
            str(one.num_output_tokens),
            str(one.num_reasoning_tokens),
            f"{_money(one.price_nanos)} {one.currency}",
        )
        for one in sums
    ]
    if args.csv:
        csv.writer(sys.stdout).writerows([header, *rows])
    else:
        print(text_table(header, rows))
    return 0


def _known_account(accounts: Iterable[Account], name_or_id: str) -> str:
    from twinfire.accounts.account import OPEN_ACCOUNT, OPERATOR_ACCOUNT

    for account in (*accounts, OPEN_ACCOUNT, OPERATOR_ACCOUNT):
        if name_or_id in (account.id, account.name):
            return account.id
    raise InvalidRequest(f"there is no account `{name_or_id}`", "account")


def _accounts(args: argparse.Namespace) -> AccountStore:
    from twinfire.accounts.account_store import AccountStore

    return AccountStore(_database(args))


def _usage_store(args: argparse.Namespace) -> UsageStore:
    from twinfire.accounts.usage_store import UsageStore

    return UsageStore(_database(args))


def _database(args: argparse.Namespace) -> Database:
    from twinfire.accounts.database import open_database

    if args.accounts_db == NO_DATABASE:
        raise InvalidRequest("`--accounts-db none` has no accounts", "accounts-db")
    return open_database(args.accounts_db or default_database())


def _changed_limits(limits: Limits, args: argparse.Namespace) -> Limits:
    """Return `limits` with what the options say."""
    from twinfire.accounts.limits import NUMERIC_LIMITS, Limits
    from twinfire.accounts.prices import nanos_of

    changes: dict[str, int | None] = {}
    for name in _LIMIT_OPTIONS:
        value = getattr(args, name)
        if value is not None:
            changes[name] = None if value == _NO_LIMIT else value
    if args.budget_per_day is not None:
        is_none = args.budget_per_day == _NO_LIMIT
        changes["budget_nanos_per_day"] = None if is_none else nanos_of(args.budget_per_day)
    models = limits.models
    if args.model:
        models = None if "all" in args.model else tuple(args.model)
    kept = {name: getattr(limits, name) for name in NUMERIC_LIMITS}
    return Limits(**(kept | changes), models=models)


def _shown_limits(limits: Limits) -> str:
    shown = [
        f"{getattr(limits, name)} {text}"
        for name, text in _LIMIT_OPTIONS.items()
        if getattr(limits, name) is not None
    ]
    if limits.budget_nanos_per_day is not None:
        shown.append(f"{_money(limits.budget_nanos_per_day)} a day")
    if limits.models is not None:
        shown.append("models " + ", ".join(limits.models))
    return "; ".join(shown) or "none"


def _state(disabled: bool, is_admin: bool) -> str:
    return ("disabled" if disabled else "live") + (", admin" if is_admin else "")


def _money(nanos: int) -> str:
    from twinfire.accounts.prices import money

    return money(nanos)


def _shown_time(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M")
