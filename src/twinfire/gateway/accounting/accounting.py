"""What handlers see of accounts: who is it, may it run, and the record at its end."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from typing import TYPE_CHECKING

from starlette.datastructures import Headers

from twinfire.accounts.account import Account
from twinfire.accounts.account_store import AccountStore
from twinfire.accounts.database import Database, DatabaseUnavailable
from twinfire.accounts.prices import PriceTable
from twinfire.accounts.rates import LocalRates, Rates
from twinfire.accounts.shared_rates import HEARTBEAT_S, SharedRates
from twinfire.accounts.usage_record import UsageRecord
from twinfire.accounts.usage_store import UsageStore
from twinfire.gateway.accounting.access import Access
from twinfire.gateway.accounting.access_mode import AccessMode
from twinfire.gateway.accounting.admission import Admission
from twinfire.gateway.accounting.bill import Bill, Reservation
from twinfire.gateway.accounting.identity import Identity
from twinfire.gateway.accounting.usage_writer import UsageWriter
from twinfire.gateway.errors import HttpError

if TYPE_CHECKING:
    from twinfire.gateway.exchange import Exchange

TRACE_HEADER = "traceparent"
"""Of W3C Trace Context."""
COST_HEADER = "twinfire-cost"
"""`1` asks for the price in the answer's usage."""
ACCOUNT_PLACEHOLDER = "{account_id}"
"""Copied from the service's documentation, where nobody filled it in."""
_THREADS = 4

log = logging.getLogger(__name__)


class Accounting:
    """Accounts, limits, prices and the ledger of one gateway. Belongs to the event loop."""

    def __init__(
        self,
        database: Database,
        prices: PriceTable,
        mode: AccessMode,
        keys: Sequence[str],
        model_names: Callable[[str], Sequence[str]],
    ) -> None:
        """`model_names` gives all names of the model that a client calls by one of them."""
        self.prices = prices
        self.on_ended: Callable[[Bill, UsageRecord], None] = lambda bill, record: None
        """Hears of the end of each request that was admitted."""
        self._database = database
        self._mode: AccessMode = mode
        self._keys = tuple(keys)
        self._model_names = model_names
        self._threads = ThreadPoolExecutor(_THREADS, "twinfire-accounts")
        self._starting: asyncio.Task[_Running] | None = None

    async def start(self) -> None:
        """Open the tables and read the accounts. Everything else waits for that by itself."""
        await self._running()

    async def close(self) -> None:
        """Commit what is left."""
        if self._starting is not None:
            running = await self._starting
            await running.close()
        self._threads.shutdown()

    async def identify(self, headers: Headers) -> Identity:
        """Return who sent a request; 401 for nobody, 403 for a disabled account."""
        with _told():
            return await (await self._running()).access.identify(headers)

    async def is_open(self) -> bool:
        """Whether requests without a token are served."""
        return (await self._running()).access.is_open

    async def usage(self) -> UsageStore:
        """Return the ledger; it blocks."""
        return (await self._running()).usage

    async def accounts(self) -> AccountStore:
        """Return the accounts; it blocks."""
        return (await self._running()).accounts

    def check_account(self, exchange: Exchange, account_id: str) -> None:
        """Refuse (403) a path that names another account than the token's.

        Where no account's token was used, any path will do; so does `{account_id}` as it stands in
        examples, which means the token's own.
        """
        account = exchange.account
        own = (account.id, account.name, ACCOUNT_PLACEHOLDER)
        if account.has_row and account_id not in own:
            raise HttpError(403, "The token is not of this account.", code="wrong_account")

    def may_use(self, exchange: Exchange, model: str) -> bool:
        """Whether the exchange's account may use the model of a name."""
        return exchange.account.limits.allows_model(model, *self._model_names(model))

    def check_model(self, exchange: Exchange, model: str) -> None:
        """Refuse (403) a model that the exchange's account may not use."""
        if not self.may_use(exchange, model):
            raise HttpError(
                403,
                f"The account may not use the model `{model}`.",
                param="model",
                code="model_not_allowed",
            )

    async def admit(
        self, exchange: Exchange, model: str, num_prompt_tokens: int, max_tokens: int
    ) -> Bill:
        """Take the limits of the exchange's account for a request to `model`.

        `max_tokens` bounds the output of all choices together. HttpError 403 for a model that the
        account may not use, 402 and 429 when its budget or a rate is used up. The bill becomes the
        exchange's, which sees to it that there is a record.
        """
        with _told():
            running = await self._running()
        identity = exchange.identity
        account = identity.account
        self.check_model(exchange, model)
        price = self.prices.of(model, *self._model_names(model))
        num_output = running.admission.guess_output(account.id, max_tokens)
        reserved = Reservation(
            num_prompt_tokens + num_output, price.nanos(num_prompt_tokens, 0, num_output)
        )
        with _told():
            exchange.answer_headers += await running.admission.take(account, reserved)
        bill = Bill(
            identity=identity,
            request_id=exchange.request_id,
            endpoint=exchange.path,
            model=model,
            price=price,
            currency=self.prices.currency,
            reserved=reserved,
            shows_cost=exchange.headers.get(COST_HEADER) == "1",
            commit=running.commit,
            submit=running.writer.submit,
            release=running.release,
            ended=self.on_ended,
            traceparent=exchange.headers.get(TRACE_HEADER, ""),
            arrival_s=exchange.arrival_s,
        )
        exchange.open_bill(bill)
        return bill

    async def _running(self) -> _Running:
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        try:
            # One caller that gives up must not take the others with it.
            return await asyncio.shield(self._starting)
        except DatabaseUnavailable:
            self._starting = None
            raise

    async def _start(self) -> _Running:
        loop = asyncio.get_running_loop()
        accounts, usage, rates = await loop.run_in_executor(self._threads, self._open_stores)
        access = Access(accounts, self._mode, self._keys)
        admission = Admission(
            rates,
            usage,
            self._threads,
            is_shared=self._database.is_shared,
            currency=self.prices.currency,
        )
        writer = UsageWriter(usage, admission.learn_spent)
        running = _Running(accounts, usage, rates, access, admission, writer)
        await access.start()
        return running

    def _open_stores(self) -> tuple[AccountStore, UsageStore, Rates]:
        accounts, usage = AccountStore(self._database), UsageStore(self._database)
        if self._database.is_shared:
            return accounts, usage, SharedRates(self._database, uuid.uuid4().hex)
        return accounts, usage, LocalRates()


class _Running:
    """Everything that needs the tables."""

    def __init__(
        self,
        accounts: AccountStore,
        usage: UsageStore,
        rates: Rates,
        access: Access,
        admission: Admission,
        writer: UsageWriter,
    ) -> None:
        self.accounts = accounts
        self.usage = usage
        self.access = access
        self.admission = admission
        self.writer = writer
        self._shared = rates if isinstance(rates, SharedRates) else None
        self._beating = asyncio.create_task(self._heartbeat()) if self._shared else None

    async def commit(self, record: UsageRecord) -> None:
        """Commit a record; HttpError 503 when that cannot be done."""
        with _told():
            await self.writer.commit(record)

    def release(self, bill: Bill, num_used: int) -> None:
        """Give back what a request took."""
        meter = bill.meter
        num_output = None if meter is None else meter.num_output_tokens
        self.admission.give_back(bill.identity.account, bill.reserved, num_used, num_output)

    async def close(self) -> None:
        """Commit what is left."""
        await self.access.close()
        await self.writer.close()
        if self._beating is not None and self._shared is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
            await asyncio.gather(asyncio.to_thread(self._shared.leave), return_exceptions=True)

    async def _heartbeat(self) -> None:
        assert self._shared is not None
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            # A database that is away is told of by those who need it.
            await asyncio.gather(asyncio.to_thread(self._shared.heartbeat), return_exceptions=True)


@contextmanager
def _told() -> Iterator[None]:
    """Tell clients nothing of the database but that it is away; the log has the rest."""
    try:
        yield
    except DatabaseUnavailable as error:
        log.error("%s", error)
        raise HttpError(
            503,
            "The accounts' database does not answer.",
            code="accounts_unavailable",
            headers=(("retry-after", "1"),),
        ) from None


def tenant_salt(account: Account, salt: str) -> str:
    """Return the prefix-cache salt of a request that asks for `salt` itself, "" for none.

    The account's own salt is part of it, so that two accounts never share a block and none can
    find out by its timing what another one's prompt was.
    """
    if not account.cache_salt:
        return salt
    return sha256(f"{account.cache_salt}/{salt}".encode()).hexdigest()
