"""What a link does with whatever a worker says of one request."""

from __future__ import annotations

from typing import Protocol

from twinfire.gateway.backends.backend import Event
from twinfire.protocol.messages import HandOffFailed, Preempted, PrefillProgress, Reserved

Notice = PrefillProgress | Preempted | Reserved | HandOffFailed


class LinkRequest(Protocol):
    """A request on one link, under a request id that no other request of this gateway has.

    Called on the event loop's thread as frames come, and must not wait.
    """

    def all_choices_ended(self) -> bool:
        """Whether the worker has nothing more to say of it; asked after an ending event."""
        ...

    def put(self, event: Event) -> None:
        """The prompt is done, or a choice has gained something."""
        ...

    def note(self, notice: Notice) -> None:
        """Something happened that gives no output."""
        ...

    def fail(self, error: Exception) -> None:
        """The worker does nothing more for it: refused, or lost."""
        ...
