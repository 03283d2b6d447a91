"""Faults that a user can cause or must be told of, as types.

Each room raises these; only the gateway knows which HTTP status a type becomes.
"""

from __future__ import annotations


class TwinfireError(Exception):
    """Base of every error that carries a message meant for a person."""


class InvalidRequest(TwinfireError):
    """The request itself is wrong. `param` names the field, when one field is to blame."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class ModelError(TwinfireError):
    """A model cannot be found, read or supported; the message says which and what would do."""


class MemoryTooSmall(TwinfireError):
    """The KV cache cannot hold one sequence; the message says how many bytes would."""


class WorkerLost(TwinfireError):
    """The worker that was computing a request is gone."""


class Overloaded(TwinfireError):
    """Too much is queued already. `retry_after_s` is an honest guess of when to come back."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(TwinfireError):
    """The request's time was over before it was complete."""
