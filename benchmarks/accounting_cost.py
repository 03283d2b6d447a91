"""What accounts cost a request: who is it, may it run, and the committed record.

    python benchmarks/accounting_cost.py [--db postgresql://...]

Medians over requests one after another, and the CPU of the event loop's thread a request with many
at once, where one transaction books many of them. Per token there is nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import Message

from twinfire.accounts.account_store import AccountStore
from twinfire.accounts.database import Database, open_database
from twinfire.accounts.limits import Limits
from twinfire.accounts.prices import PriceTable
from twinfire.gateway.accounting.accounting import Accounting
from twinfire.gateway.exchange import Exchange
from twinfire.gateway.metrics import Metrics
from twinfire.gateway.request_meter import RequestMeter
from twinfire.gateway.settings import GatewaySettings
from twinfire.protocol.messages import PromptDone

LIMITS = Limits(
    requests_per_minute=10**9,
    tokens_per_minute=10**12,
    concurrency=10**6,
    budget_tokens_per_day=10**15,
    budget_nanos_per_day=10**17,
)


async def _receive() -> Message:
    return {"type": "http.disconnect"}


async def _send(message: Message) -> None:
    del message


class Requests:
    """One request after another, each through all of it."""

    def __init__(self, accounting: Accounting, token: str) -> None:
        self._accounting = accounting
        self._headers = [(b"authorization", f"Bearer {token}".encode())]
        self._metrics = Metrics("m")
        self.times: dict[str, list[float]] = {"identify": [], "admit": [], "settle": []}

    async def one(self) -> None:
        scope = {"type": "http", "method": "POST", "path": "/x", "headers": self._headers}
        exchange = Exchange(scope, _receive, _send, GatewaySettings())

        async def timed(name: str, work: Callable[[], Awaitable[None]]) -> None:
            begin_s = time.perf_counter()
            await work()
            self.times[name].append(time.perf_counter() - begin_s)

        async def identify() -> None:
            exchange.identity = await self._accounting.identify(Headers(raw=self._headers))

        async def admit() -> None:
            await self._accounting.admit(exchange, "m", 1000, 200)

        await timed("identify", identify)
        await timed("admit", admit)
        bill = exchange.bill
        assert bill is not None
        meter = RequestMeter(self._metrics, exchange.arrival_s, [1000], 1)
        bill.follow(meter, lambda: None)
        meter.prompt_done(0, PromptDone(1, 500, 0.001, 0.01, None))
        await timed("settle", bill.settle)


async def _measure(database: Database, count: int, at_once: int) -> None:
    store = AccountStore(database)
    store.create("a", LIMITS)
    token, _ = store.create_token("a")
    accounting = Accounting(database, PriceTable(), "tokens", (), lambda _: ())
    requests = Requests(accounting, token)
    for _ in range(50):
        await requests.one()
    for times in requests.times.values():
        times.clear()
    begin_s = time.perf_counter()
    for _ in range(count):
        await requests.one()
    alone_s = (time.perf_counter() - begin_s) / count
    shown = ", ".join(
        f"{name} {statistics.median(times) * 1e6:.0f}" for name, times in requests.times.items()
    )
    print(f"one after another, median us: {shown}; in all {alone_s * 1e6:.0f} a request")

    async def client() -> None:
        for _ in range(count // at_once):
            await requests.one()

    begin_s, begin_cpu_s, begin_all_s = time.perf_counter(), time.thread_time(), time.process_time()
    await asyncio.gather(*(client() for _ in range(at_once)))
    num = count // at_once * at_once
    wall, loop, cpu = (
        (end - begin) / num * 1e6
        for end, begin in (
            (time.perf_counter(), begin_s),
            (time.thread_time(), begin_cpu_s),
            (time.process_time(), begin_all_s),
        )
    )
    print(
        f"{at_once} at once, us a request: {wall:.0f} of time, {loop:.0f} of the loop's CPU, "
        f"{cpu:.0f} of all threads' CPU"
    )
    await accounting.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--db", help="SQLite file or URL (default: a new file)")
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--at-once", type=int, default=32)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        database = open_database(args.db or str(Path(name) / "accounts.db"))
        asyncio.run(_measure(database, args.count, args.at_once))
        database.close()


if __name__ == "__main__":
    main()
