"""Whether an account may start a request: its models, its budget, its rates.

Refusals say which limit and when to come back. What a request takes is an estimate, corrected when
it ends. With a shared database rates and budgets hold over all gateways; what is reserved for
running requests of a budget is each gateway's own.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from concurrent.futures import Executor

from twinfire.accounts.account import Account
from twinfire.accounts.limits import Limits
from twinfire.accounts.prices import money
from twinfire.accounts.rates import Rates, RateState
from twinfire.accounts.usage_record import seconds_to_next_day, utc_day
from twinfire.accounts.usage_store import DaySpent, UsageStore
from twinfire.gateway.accounting.bill import Reservation
from twinfire.gateway.accounting.usage_writer import Spent
from twinfire.gateway.errors import HttpError

_FIRST_GUESS_TOKENS = 256.0
"""Output of an account's first request, where it may be as long."""
_GUESS_WEIGHT = 0.1
_SHARED_AGE_S = 2.0
"""Other gateways' spending is looked up when ours is older than this."""
_MAX_DAYS_KNOWN = 100_000

_HeaderList = tuple[tuple[str, str], ...]


class Admission:
    """Takes and gives back. Belongs to the event loop; blocking parts run on `threads`."""

    def __init__(
        self, rates: Rates, usage: UsageStore, threads: Executor, *, is_shared: bool, currency: str
    ) -> None:
        self._rates = rates
        self._usage = usage
        self._threads = threads
        self._is_shared = is_shared
        self._currency = currency
        self._spent: dict[tuple[str, str], tuple[float, DaySpent]] = {}
        self._reserved: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        self._guesses: dict[str, float] = {}

    def guess_output(self, account_id: str, max_tokens: int) -> int:
        """Return how long an account's answer will be, from how long its last ones were."""
        return min(max_tokens, math.ceil(self._guesses.get(account_id, _FIRST_GUESS_TOKENS)))

    async def take(self, account: Account, reserved: Reservation) -> _HeaderList:
        """Take a request's share; HttpError 402 or 429 when there is none.

        Returns the headers that tell the client what is left.
        """
        limits = account.limits
        await self._check_budget(account, reserved)
        headers: _HeaderList = ()
        if _has_rates(limits):
            if limits.tokens_per_minute is not None:
                _check_can_ever_fit(reserved.num_tokens, limits.tokens_per_minute)
            state = await self._take_rates(account.id, limits, reserved.num_tokens)
            headers = _rate_headers(limits, state)
            if state.refused_by is not None:
                raise _over_rate(limits, state, headers)
        kept = self._reserved[account.id]
        kept[0] += reserved.num_tokens
        kept[1] += reserved.price_nanos
        return headers

    def give_back(
        self, account: Account, reserved: Reservation, num_used: int, num_output: int | None
    ) -> None:
        """End a request that used `num_used` tokens; `num_output` None teaches nothing."""
        kept = self._reserved[account.id]
        kept[0] -= reserved.num_tokens
        kept[1] -= reserved.price_nanos
        if num_output is not None:
            guess = self._guesses.get(account.id, _FIRST_GUESS_TOKENS)
            self._guesses[account.id] = guess + _GUESS_WEIGHT * (num_output - guess)
        if _has_rates(account.limits):
            rest = reserved.num_tokens - num_used
            if self._rates.blocks:
                self._threads.submit(self._rates.give_back, account.id, account.limits, rest)
            else:
                self._rates.give_back(account.id, account.limits, rest)

    def learn_spent(self, spent: Spent) -> None:
        """Take note of what was booked."""
        now_s = time.monotonic()
        if len(self._spent) > _MAX_DAYS_KNOWN:
            self._spent.clear()
        for key, value in spent.items():
            self._spent[key] = (now_s, value)

    async def _take_rates(self, account_id: str, limits: Limits, num_tokens: int) -> RateState:
        if not self._rates.blocks:
            return self._rates.take(account_id, limits, num_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._threads, self._rates.take, account_id, limits, num_tokens
        )

    async def _check_budget(self, account: Account, reserved: Reservation) -> None:
        limits = account.limits
        token_budget, money_budget = limits.budget_tokens_per_day, limits.budget_nanos_per_day
        if token_budget is None and money_budget is None:
            return
        spent = await self._spent_today(account.id)
        kept_tokens, kept_nanos = self._reserved[account.id]
        if token_budget is not None:
            left = token_budget - spent.num_tokens - kept_tokens
            if reserved.num_tokens > left:
                raise _over_budget(
                    f"{token_budget} tokens a day, {max(0, left)} are left and the request may "
                    f"take {reserved.num_tokens}"
                )
        if money_budget is not None:
            nanos_left = money_budget - spent.price_nanos - kept_nanos
            if reserved.price_nanos > nanos_left or nanos_left <= 0:
                raise _over_budget(
                    f"{money(money_budget)} {self._currency} a day, {money(max(0, nanos_left))} "
                    f"is left and the request may cost {money(reserved.price_nanos)}"
                )

    async def _spent_today(self, account_id: str) -> DaySpent:
        key = (account_id, utc_day(time.time()))
        known = self._spent.get(key)
        if known is not None:
            age_s = time.monotonic() - known[0]
            if not self._is_shared or age_s < _SHARED_AGE_S:
                return known[1]
        loop = asyncio.get_running_loop()
        spent = await loop.run_in_executor(self._threads, self._usage.spent, *key)
        newer = self._spent.get(key)
        if newer is not None and newer is not known:
            # A commit told us more while we asked.
            return newer[1]
        self._spent[key] = (time.monotonic(), spent)
        return spent


def _has_rates(limits: Limits) -> bool:
    return not (
        limits.requests_per_minute is None
        and limits.tokens_per_minute is None
        and limits.concurrency is None
    )


def _check_can_ever_fit(num_tokens: int, per_minute: int) -> None:
    if num_tokens > per_minute:
        raise HttpError(
            400,
            f"The request may take {num_tokens} tokens; the account may use {per_minute} a minute.",
            code="tokens_over_limit",
        )


def _over_budget(what: str) -> HttpError:
    wait_s = math.ceil(seconds_to_next_day(time.time()))
    return HttpError(
        402,
        f"The account's budget is {what}. It begins anew at 00:00 UTC.",
        code="budget_exhausted",
        headers=(("retry-after", str(wait_s)),),
    )


def _over_rate(limits: Limits, state: RateState, headers: _HeaderList) -> HttpError:
    name = state.refused_by or ""
    unit = {
        "requests_per_minute": "requests a minute",
        "tokens_per_minute": "tokens a minute",
        "concurrency": "requests at once",
    }[name]
    wait_s = max(1, math.ceil(state.retry_after_s))
    return HttpError(
        429,
        f"The account may use {getattr(limits, name)} {unit}; try again in {wait_s} s.",
        code="rate_limit_exceeded",
        headers=(("retry-after", str(wait_s)), *headers),
    )


def _rate_headers(limits: Limits, state: RateState) -> _HeaderList:
    headers: list[tuple[str, str]] = []
    for kind, limit, left, full_s in (
        ("requests", limits.requests_per_minute, state.requests_left, state.requests_full_s),
        ("tokens", limits.tokens_per_minute, state.tokens_left, state.tokens_full_s),
    ):
        if limit is not None:
            headers += [
                (f"x-ratelimit-limit-{kind}", str(limit)),
                (f"x-ratelimit-remaining-{kind}", str(left)),
                (f"x-ratelimit-reset-{kind}", f"{full_s:.3f}s"),
            ]
    return tuple(headers)
