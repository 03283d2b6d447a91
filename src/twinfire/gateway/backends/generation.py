"""One request in flight: the events that have come and who waits for them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from twinfire.gateway.backends.backend import Event, Take
from twinfire.gateway.backends.link_request import Notice
from twinfire.gateway.backends.route_record import RouteRecord
from twinfire.protocol.errors import DeadlineExceeded
from twinfire.protocol.messages import ALL_CHOICES, ChoiceDelta


class LinkGeneration:
    """A buffer between workers and one consumer. Belongs to the event loop's thread.

    `cancel` is called with what the consumer no longer wants.
    """

    def __init__(self, num_choices: int, cancel: Callable[[int], None]) -> None:
        self._on_cancel = cancel
        self._events: deque[Event] = deque()
        self._live_choices = set(range(num_choices))
        self._take: Take | None = None
        self._error: Exception | None = None
        self._wake = asyncio.Event()
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def record(self) -> RouteRecord | None:
        """A link has one worker and nothing to choose."""
        return None

    def all_choices_ended(self) -> bool:
        """Whether nothing more can come."""
        return not self._live_choices

    def end_at(self, deadline_s: float) -> None:
        """End with DeadlineExceeded when the loop's clock reaches `deadline_s`."""
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_at(deadline_s, self.expire)

    def put(self, event: Event) -> None:
        """Add an event; those of cancelled choices are dropped."""
        if isinstance(event, ChoiceDelta):
            if event.choice not in self._live_choices:
                return
            if event.finish_reason is not None:
                self._live_choices.discard(event.choice)
                if not self._live_choices:
                    self._forget_deadline()
        if self._take is not None and not self._events:
            try:
                taken = self._take(event)
            except Exception as error:
                # A fault of this request's consumer, which must not reach the link's others.
                self._take = None
                self.fail(error)
                return
            if taken:
                if not self._live_choices:
                    self._wake.set()
                return
        self._events.append(event)
        self._wake.set()

    def note(self, notice: Notice) -> None:
        """Nobody waits for news without output."""

    def offer_to(self, take: Take) -> None:
        """Let `take` have each event before it is kept, whenever none is kept."""
        self._take = take

    def fail(self, error: Exception) -> None:
        """End with `error` once the events before it have been read."""
        self._error = error
        self._forget_deadline()
        self._wake.set()

    def expire(self) -> None:
        """End now: the request's time is over."""
        if self._live_choices and self._error is None:
            self._error = DeadlineExceeded("the request's time was over before it was complete")
            self.cancel()

    def cancel(self, choice: int = ALL_CHOICES) -> None:
        """Stop one choice or all of them; what they have sent already is dropped."""
        cancelled = set(self._live_choices) if choice == ALL_CHOICES else {choice}
        if not cancelled & self._live_choices:
            return
        self._live_choices -= cancelled
        self._events = deque(
            event
            for event in self._events
            if not (isinstance(event, ChoiceDelta) and event.choice in cancelled)
        )
        if not self._live_choices:
            self._forget_deadline()
        self._on_cancel(choice)
        self._wake.set()

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Yield events in order until every choice has ended."""
        while True:
            while self._events:
                yield self._events.popleft()
            if self._error is not None:
                raise self._error
            if not self._live_choices:
                return
            self._wake.clear()
            await self._wake.wait()
