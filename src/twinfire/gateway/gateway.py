"""What every handler shares: the models, the settings and the requests in flight.

Owns the threads for long texts and the drain: from `start_drain` on nothing new is taken, and what
runs is counted until it is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from twinfire.accounts.database import open_database
from twinfire.gateway.accounting.accounting import Accounting
from twinfire.gateway.accounting.bill import Bill
from twinfire.gateway.batches.private_file import private_database_file
from twinfire.gateway.checked_grammars import CheckedGrammars
from twinfire.gateway.errors import HttpError, not_ready
from twinfire.gateway.exchange import Exchange
from twinfire.gateway.external.external_models import ExternalModels
from twinfire.gateway.hosted_model import HostedModels, ReadyModel
from twinfire.gateway.request_log import RequestLog
from twinfire.gateway.settings import GatewaySettings
from twinfire.protocol.errors import InvalidRequest

BackgroundCall = Callable[[], Awaitable[None]]
DRAINING = "the server is shutting down"

P = ParamSpec("P")
R = TypeVar("R")


class Gateway:
    """The state behind one application. Belongs to the event loop's thread."""

    def __init__(
        self,
        settings: GatewaySettings,
        models: HostedModels,
        external: ExternalModels | None = None,
    ) -> None:
        """`external` are models that other engines serve; InvalidRequest for a name used twice."""
        self.settings = settings
        self.models = models
        self.external = external or ExternalModels()
        for name in self.external.by_name:
            if name in models.by_name:
                raise InvalidRequest(f"two models are called `{name}`", "names")
        self.database = open_database(settings.database or private_database_file())
        """What must outlive the process, or as long as it lives where there is none."""
        self.accounting = Accounting(
            self.database, settings.prices, settings.access, settings.api_keys, self._names_of
        )
        self.requests = RequestLog()
        self.accounting.on_ended = self.requests.add_billed
        self.draining = False
        self.checked_grammars = CheckedGrammars()
        self._exchanges: set[Exchange] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._background: list[tuple[BackgroundCall, BackgroundCall]] = []
        self._closers: list[Callable[[], None]] = []
        self._text_threads = ThreadPoolExecutor(settings.text_threads, "twinfire-text")

    @property
    def unready_reason(self) -> str | None:
        """Why not every request can be served now, None when all can."""
        if self.draining:
            return DRAINING
        reasons = self.models.unready_reasons() | self.external.unready_reasons()
        if len(self.model_names) == 1:
            return next(iter(reasons.values()), None)
        return "; ".join(f"{name}: {reason}" for name, reason in reasons.items()) or None

    @property
    def model_names(self) -> list[str]:
        """The first name of every model, other engines' included."""
        own = [one.model.names[0] for one in self.models]
        return own + [pool.names[0] for pool in self.external.pools]

    def ready_model(self, name: str | None) -> ReadyModel:
        """Return our own model to serve a request that names `name`.

        404 for a name that nobody has, 400 for an external model's, 503 with the reason while the
        model cannot be served. The name may be left out where there is one model.
        """
        if self.draining:
            raise not_ready(DRAINING)
        if not name:
            known = self.model_names
            if len(known) > 1:
                names = ", ".join(f"`{one}`" for one in known)
                raise HttpError(400, f"`model` is needed; there are {names}.", param="model")
            name = known[0]
        if name in self.external.by_name:
            message = (
                f"The model `{name}` is served by other engines, which do not offer this here."
            )
            raise HttpError(400, message, param="model", code="external_model")
        return self.models.ready(name)

    def _names_of(self, name: str) -> tuple[str, ...]:
        """Return all names of the model that a client calls `name`."""
        own = self.models.by_name.get(name)
        other = self.external.by_name.get(name)
        return (*(own.model.names if own else ()), *(other.names if other else ()))

    async def handle_text(
        self, num_chars: int, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Run `work` on a text of `num_chars`: here when it is short, else on a thread."""
        if num_chars <= self.settings.inline_text_chars:
            return work(*args, **kwargs)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._text_threads, lambda: work(*args, **kwargs))

    @property
    def num_served(self) -> int:
        """Requests that somebody waits for and that a model computes."""
        return sum(one.generates for one in self._exchanges)

    def add_background(self, start: BackgroundCall, stop: BackgroundCall) -> None:
        """Have `start` awaited when serving begins, and `stop` before the drain."""
        self._background.append((start, stop))

    def on_close(self, close: Callable[[], None]) -> None:
        """Have `close`, which may block, called after the last request's end."""
        self._closers.append(close)

    async def start_background(self) -> None:
        """Begin what goes on beside requests, once it is known who may send any."""
        await self.accounting.start()
        for start, _ in self._background:
            await start()

    def enter(self, exchange: Exchange) -> None:
        """Count an exchange in; 503 while draining."""
        if self.draining:
            raise not_ready(DRAINING)
        self._exchanges.add(exchange)
        self._idle.clear()

    def leave(self, exchange: Exchange) -> None:
        """Count an exchange out; one that never entered is ignored."""
        if exchange in self._exchanges:
            self._exchanges.remove(exchange)
            self.requests.add_unbilled(exchange)
        if not self._exchanges:
            self._idle.set()

    @property
    def open_bills(self) -> list[Bill]:
        """Those of requests that are served now, in no order."""
        bills = (exchange.bill for exchange in self._exchanges)
        return [bill for bill in bills if bill is not None and bill.is_open]

    def start_drain(self) -> None:
        """Take nothing new from now on."""
        self.draining = True

    async def drain(self, hurry: asyncio.Event) -> bool:
        """Wait until what runs is done, up to the limit or `hurry`; end the rest with an error.

        Returns whether everything finished by itself.
        """
        self.start_drain()
        for _, stop in self._background:
            await stop()
        idle = asyncio.create_task(self._idle.wait())
        hurried = asyncio.create_task(hurry.wait())
        await asyncio.wait(
            {idle, hurried},
            timeout=self.settings.drain_timeout_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        hurried.cancel()
        finished = idle.done()
        for exchange in list(self._exchanges):
            exchange.abort(
                HttpError(503, DRAINING, code="shutting_down", headers=(("connection", "close"),))
            )
        await idle
        return finished

    async def close(self) -> None:
        """Commit what is left of the usage, and let all threads end."""
        await self.accounting.close()
        for close in self._closers:
            await asyncio.to_thread(close)
        self.database.close()
        self._text_threads.shutdown(wait=False, cancel_futures=True)
