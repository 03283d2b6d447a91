"""What the dialects ask of whatever computes tokens."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from twinfire.gateway.backends.request_context import NO_CONTEXT, RequestContext
from twinfire.gateway.backends.route_record import RouteRecord
from twinfire.protocol.messages import ALL_CHOICES, ChoiceDelta, PromptDone, WorkerInfo
from twinfire.protocol.sampling import SamplingParams

Event = PromptDone | ChoiceDelta
Take = Callable[[Event], bool]
"""Handles an event at once and returns True, or leaves it to be iterated and returns False."""


class Generation(Protocol):
    """One submitted request.

    Iterating yields its `PromptDone` before any `ChoiceDelta`, and ends after every choice has had
    a `finish_reason`. Raises InvalidRequest when the worker refuses it, Overloaded when it is
    full, WorkerLost when it dies, DeadlineExceeded when its time is over. `cancel` is idempotent,
    never blocks and makes the worker free its blocks; a cancelled choice yields nothing more.
    """

    @property
    def record(self) -> RouteRecord | None:
        """How the request was served so far; None where there is nothing to choose."""
        ...

    def __aiter__(self) -> AsyncIterator[Event]:
        """Iterate the events, once."""
        ...

    def offer_to(self, take: Take) -> None:
        """Let `take` have events the moment they come, without a task waking up for each.

        An event is offered only when no earlier one waits to be iterated, so order is kept whatever
        `take` refuses. What it raises ends the generation. A generation need not offer any.
        """
        ...

    def cancel(self, choice: int = ALL_CHOICES) -> None:
        """Stop one choice or all of them."""
        ...


class Backend(Protocol):
    """A pool of workers for one model."""

    @property
    def worker_info(self) -> WorkerInfo | None:
        """The worker's description, None until it is ready."""
        ...

    @property
    def unready_reason(self) -> str | None:
        """Why no request can be served now, None when one can."""
        ...

    def submit(
        self,
        prompt: array[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        context: RequestContext = NO_CONTEXT,
    ) -> Generation:
        """Send a request; WorkerLost when no worker is ready."""
        ...
