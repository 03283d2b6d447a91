"""Every fault that a client can see: its status, and the one shape its body has.

Owns the tables from exception to status and from status to error type. Other files raise; only
this one knows how a fault looks on the wire.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from twinfire.protocol.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    TwinfireError,
    WorkerLost,
)

STATUS_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    402: "PaymentRequiredError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "TimeoutError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    431: "HeadersTooLargeError",
    500: "InternalServerError",
    502: "BadGatewayError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}


class GenerationFailed(TwinfireError):
    """The engine gave up on a request."""


EXCEPTION_STATUS: tuple[tuple[type[Exception], int], ...] = (
    (InvalidRequest, 400),
    (Overloaded, 429),
    (WorkerLost, 503),
    (DeadlineExceeded, 504),
    (GenerationFailed, 500),
)

INTERNAL_MESSAGE = "The server failed to process the request; its log says why."


class HttpError(TwinfireError):
    """A fault of the HTTP side itself. `status` is a key of STATUS_TYPES."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers


def not_ready(reason: str) -> HttpError:
    """No request can be served now."""
    return HttpError(503, reason, code="not_ready", headers=(("retry-after", "1"),))


def unknown_model(name: str) -> HttpError:
    """The request names a model that is not served here."""
    message = f"The model `{name}` does not exist."
    return HttpError(404, message, param="model", code="model_not_found")


class ErrorDetail(msgspec.Struct):
    """The inside of an error body."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """The body of every answer that is not a success."""

    error: ErrorDetail


@dataclass(frozen=True, slots=True)
class Fault:
    """An exception as the client sees it."""

    status: int
    body: ErrorBody
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def is_ours(self) -> bool:
        """Whether nobody foresaw it, so that the log needs the traceback."""
        return self.status == 500

    def encode(self) -> bytes:
        """Return the JSON body."""
        return msgspec.json.encode(self.body)


def fault_of(error: Exception) -> Fault:
    """Return how `error` looks from outside; what the tables do not know is a 500."""
    if isinstance(error, HttpError):
        detail = _detail(error.status, error.message, error.param, error.code)
        return Fault(error.status, ErrorBody(detail), error.headers)
    for kind, status in EXCEPTION_STATUS:
        if isinstance(error, kind):
            param = getattr(error, "param", None)
            code = getattr(error, "code", None)
            detail = _detail(status, str(error), param, code)
            return Fault(status, ErrorBody(detail), _retry_headers(error))
    return Fault(500, ErrorBody(_detail(500, INTERNAL_MESSAGE, None, None)))


def _detail(status: int, message: str, param: str | None, code: str | None) -> ErrorDetail:
    return ErrorDetail(message=message, type=STATUS_TYPES[status], param=param, code=code)


def _retry_headers(error: Exception) -> tuple[tuple[str, str], ...]:
    if isinstance(error, Overloaded):
        return (("retry-after", str(max(1, math.ceil(error.retry_after_s)))),)
    if isinstance(error, WorkerLost):
        return (("retry-after", "1"),)
    return ()
