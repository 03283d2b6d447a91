"""A response as it is kept, and what a store of them does."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response of one account. Items and the response itself are JSON."""

    response_id: str
    account_id: str
    root_id: str
    """The first response of the conversation, the response's own id where it is that."""
    previous_id: str | None
    status: str
    is_background: bool
    created_s: float
    """Unix time."""
    response: bytes
    input_items: bytes
    """Those of this request, without the conversation before it."""
    events: bytes | None = None
    """All events of its stream, where it can be streamed again."""


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """What is kept of an account; the responses that were used longest ago go first."""

    max_responses: int = 10_000
    max_bytes: int = 1 << 30
    max_age_s: float = 30 * 24 * 3600.0
    """Since the last use; a follow-up uses all of its conversation."""


class ResponseStore(Protocol):
    """Keeps responses. An account never sees another's."""

    async def save(self, stored: StoredResponse) -> None:
        """Add a response, or put it in the place of the one with its id."""
        ...

    async def find(self, account_id: str, response_id: str) -> StoredResponse | None:
        """Return a response, None when there is none of that id."""
        ...

    async def conversation(self, account_id: str, response_id: str) -> Sequence[StoredResponse]:
        """Return a response and all before it, the oldest first.

        Empty when there is none of that id; shorter than the conversation, so that the first has a
        `previous_id`, when older ones are gone.
        """
        ...

    async def delete(self, account_id: str, response_id: str) -> bool:
        """Forget a response; whether there was one."""
        ...

    async def ask_to_cancel(self, account_id: str, response_id: str) -> None:
        """Tell whichever gateway runs a response that it is not wanted."""
        ...

    async def keep_alive(self, response_ids: Collection[str]) -> Collection[str]:
        """Tell that this gateway still runs responses; returns those that are not wanted."""
        ...

    async def is_abandoned(self, response_id: str) -> bool:
        """Whether nobody has run an unfinished response for some time."""
        ...

    def close(self) -> None:
        """Let the threads end; the database is the caller's."""
        ...
