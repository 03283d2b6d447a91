"""What accounts have used over some days, and how much of today's budgets is left."""

from __future__ import annotations

import asyncio
import time

import msgspec

from twinfire.accounts.account import Account
from twinfire.accounts.account_store import AccountStore
from twinfire.accounts.prices import money
from twinfire.accounts.usage_record import utc_day
from twinfire.accounts.usage_store import UsageFilter, UsageStore
from twinfire.gateway.accounting.accounting import Accounting
from twinfire.gateway.dialects.usage_api import UsageGroup, usage_group
from twinfire.protocol.errors import InvalidRequest

MAX_DAYS = 366
_DAY_S = 86400


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """One account's day. Limits that it does not have are None."""

    account: str
    is_disabled: bool
    spent_tokens: int
    budget_tokens: int | None
    spent: str
    budget: str | None
    currency: str


class UsageView(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over the last `days`, today included."""

    days: int
    by_account: list[UsageGroup]
    by_model: list[UsageGroup]
    by_day: list[UsageGroup]
    totals: list[UsageGroup]
    """One per currency."""
    budgets: list[Budget]
    """Of accounts that have one."""


async def usage_view(accounting: Accounting, days_text: str) -> UsageView:
    """Return the sums of the ledger; InvalidRequest for what is no number of days."""
    is_number = days_text.isascii() and days_text.isdecimal() and len(days_text) < 5
    if not is_number or not 1 <= int(days_text) <= MAX_DAYS:
        raise InvalidRequest(f"`days` must be a whole number from 1 to {MAX_DAYS}.", "days")
    usage, accounts = await accounting.usage(), await accounting.accounts()
    currency = accounting.prices.currency
    return await asyncio.to_thread(_view, usage, accounts, int(days_text), currency)


def _view(usage: UsageStore, accounts: AccountStore, days: int, currency: str) -> UsageView:
    now_s = time.time()
    first_day_s = (now_s // _DAY_S - days + 1) * _DAY_S
    which = UsageFilter(since_s=first_day_s)
    known = accounts.list()
    names = {one.id: one.name for one in known}
    return UsageView(
        days=days,
        by_account=[usage_group(one, names) for one in usage.sums(which, ("account",))],
        by_model=[usage_group(one, names) for one in usage.sums(which, ("model",))],
        by_day=[usage_group(one, names) for one in usage.sums(which, ("day",))],
        totals=[usage_group(one, names) for one in usage.sums(which)],
        budgets=[
            _budget(usage, one, utc_day(now_s), currency) for one in known if _has_budget(one)
        ],
    )


def _has_budget(account: Account) -> bool:
    limits = account.limits
    return limits.budget_tokens_per_day is not None or limits.budget_nanos_per_day is not None


def _budget(usage: UsageStore, account: Account, day: str, currency: str) -> Budget:
    spent, limits = usage.spent(account.id, day), account.limits
    nanos = limits.budget_nanos_per_day
    return Budget(
        account=account.name,
        is_disabled=account.disabled,
        spent_tokens=spent.num_tokens,
        budget_tokens=limits.budget_tokens_per_day,
        spent=money(spent.price_nanos),
        budget=None if nanos is None else money(nanos),
        currency=currency,
    )
