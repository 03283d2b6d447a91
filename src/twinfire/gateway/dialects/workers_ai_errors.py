"""Faults as Workers AI tells them: a number, an HTTP status, an envelope.

Numbers and statuses are those of the service's own error table; the few that it leaves open (keys,
routing, an engine that fails) are the ones that its clients report.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from twinfire.gateway.errors import Fault
from twinfire.gateway.exchange import DONE_EVENT, Exchange

REQUEST_ID_HEADER = "cf-ai-req-id"
CAPACITY_MESSAGE = "Capacity temporarily exceeded, please try again."
"""Clients look for these words to know what may be tried again."""


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """One line of the table."""

    code: int
    http_status: int
    title: str
    """Put before our own message."""
    is_of_model: bool = True
    """Whether the message begins with `AiError`, as those of the inference side do."""


BAD_INPUT = ErrorKind(5006, 400, "Bad input: ")
INVALID_INPUT = ErrorKind(8001, 400, "Invalid input: ")
NO_SUCH_MODEL = ErrorKind(5007, 400, "No such model or task: ")
INVALID_BASE64 = ErrorKind(5004, 400, "Invalid data type for base64 input: ")
INCOMPLETE = ErrorKind(3003, 400, "Request is missing headers or body: ")
NO_SCHEMA = ErrorKind(5025, 400, "JSON Schema cannot be followed: ")
FORCED_TOOL_TOO_SHORT = ErrorKind(8006, 400, "")
MODEL_FORBIDDEN = ErrorKind(5018, 403, "The account is not allowed to access this model: ")
ACCOUNT_BLOCKED = ErrorKind(3023, 403, "Service unavailable for account: ")
INVALID_MODEL_ID = ErrorKind(3042, 404, "The model name is invalid: ")
NO_LORA = ErrorKind(5005, 405, "LoRA is not supported: ")
TIMEOUT = ErrorKind(3007, 408, "Request timeout: ")
ABORTED = ErrorKind(3008, 408, "Request was aborted: ")
TOO_LARGE = ErrorKind(3006, 413, "Request is too large: ")
BUDGET_SPENT = ErrorKind(3036, 429, "The account's allocation is used up: ")
RATE_LIMITED = ErrorKind(3040, 429, "Rate limit reached: ")
OUT_OF_CAPACITY = ErrorKind(3040, 429, CAPACITY_MESSAGE + " ")
NOT_AUTHENTICATED = ErrorKind(10000, 401, "Authentication error: ", is_of_model=False)
NO_ROUTE = ErrorKind(7003, 404, "", is_of_model=False)
WRONG_METHOD = ErrorKind(7001, 405, "", is_of_model=False)
WRONG_CONTENT_TYPE = ErrorKind(5006, 415, "Bad input: ")
NOT_AVAILABLE = ErrorKind(7009, 503, "Upstream is unavailable: ", is_of_model=False)
FAILED = ErrorKind(7009, 500, "Upstream failed: ", is_of_model=False)

_OF_CODE = {
    "account_disabled": ACCOUNT_BLOCKED,
    "batch_not_found": BAD_INPUT,
    "body_missing": INCOMPLETE,
    "budget_exhausted": BUDGET_SPENT,
    "forced_tool_too_short": FORCED_TOOL_TOO_SHORT,
    "lora_unsupported": NO_LORA,
    "model_id_invalid": INVALID_MODEL_ID,
    "model_not_allowed": MODEL_FORBIDDEN,
    "model_not_found": NO_SUCH_MODEL,
    "rate_limit_exceeded": RATE_LIMITED,
    "unsupported_schema": NO_SCHEMA,
    "wrong_account": MODEL_FORBIDDEN,
}
_OF_PARAM = {"tool_choice": INVALID_INPUT, "tools": INVALID_INPUT}
"""By the field's first name, for faults of status 400."""
_OF_STATUS = {
    400: BAD_INPUT,
    401: NOT_AUTHENTICATED,
    403: MODEL_FORBIDDEN,
    404: NO_ROUTE,
    405: WRONG_METHOD,
    408: TIMEOUT,
    413: TOO_LARGE,
    415: WRONG_CONTENT_TYPE,
    429: OUT_OF_CAPACITY,
    500: FAILED,
    503: NOT_AVAILABLE,
    504: TIMEOUT,
}


class WorkersAiError(msgspec.Struct):
    """One entry of an envelope's errors."""

    message: str
    code: int


class WorkersAiFailure(msgspec.Struct):
    """The envelope of an answer that is not a success."""

    errors: list[WorkersAiError]
    success: bool = False
    result: dict[str, str] = {}
    messages: list[str] = []


def error_kind(fault: Fault) -> ErrorKind:
    """Return the table's line for a fault."""
    detail = fault.body.error
    if detail.code in _OF_CODE:
        return _OF_CODE[detail.code]
    if fault.status == 400 and detail.param is not None:
        name = detail.param.partition(".")[0].partition("[")[0]
        if name in _OF_PARAM:
            return _OF_PARAM[name]
    return _OF_STATUS.get(fault.status, FAILED)


def workers_ai_error(fault: Fault, request_id: str) -> WorkersAiError:
    """Return a fault's number and message, which ends with the id to search a log for."""
    kind = error_kind(fault)
    prefix = "AiError: " if kind.is_of_model else ""
    message = f"{prefix}{kind.title}{fault.body.error.message} ({request_id})"
    return WorkersAiError(message, kind.code)


def failure_body(fault: Fault, request_id: str) -> bytes:
    """Return the envelope of a fault."""
    return msgspec.json.encode(WorkersAiFailure([workers_ai_error(fault, request_id)]))


def speak_workers_ai(exchange: Exchange) -> None:
    """Let all faults of an exchange be told this way, from before its handler on."""
    name_request(exchange)
    exchange.fault_status = lambda fault: error_kind(fault).http_status
    exchange.fault_body = lambda fault: failure_body(fault, exchange.request_id)
    exchange.fault_writer = lambda fault: _closing_events(fault, exchange.request_id)


def name_request(exchange: Exchange) -> None:
    """Let the answer carry the request's id under the name that this dialect's clients read."""
    exchange.answer_headers.append((REQUEST_ID_HEADER, exchange.request_id))


def _closing_events(fault: Fault, request_id: str) -> bytes:
    """A stream that has begun ends with an event that readers of either dialect know as a fault."""
    failure = WorkersAiFailure([workers_ai_error(fault, request_id)])
    fields = msgspec.to_builtins(failure) | {"error": msgspec.to_builtins(fault.body.error)}
    return b"data: " + msgspec.json.encode(fields) + b"\n\n" + DONE_EVENT
