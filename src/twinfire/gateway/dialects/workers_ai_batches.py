"""`?queueRequest=true`: batches of native requests, taken in, asked after and cancelled."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping

import msgspec
from msgspec import UNSET, Raw, UnsetType

from twinfire.gateway.accounting.identity import (
    OPEN_IDENTITY,
    OPERATOR_IDENTITY,
    Identity,
)
from twinfire.gateway.batches.batch import (
    BatchLimits,
    BatchState,
    ClaimedRequest,
    FinishedRequest,
    NewBatch,
    RequestOutcome,
)
from twinfire.gateway.batches.batches import Batches
from twinfire.gateway.detached_exchange import detached_exchange
from twinfire.gateway.dialects.chat_answer import collect_chat
from twinfire.gateway.dialects.generate import usage
from twinfire.gateway.dialects.json_body import decode_body
from twinfire.gateway.dialects.requests import ChatRequest
from twinfire.gateway.dialects.responses import Usage
from twinfire.gateway.dialects.workers_ai_errors import WorkersAiError, workers_ai_error
from twinfire.gateway.dialects.workers_ai_input import (
    Fields,
    field_of,
    read_fields,
    run_input,
)
from twinfire.gateway.dialects.workers_ai_job import prepare_run
from twinfire.gateway.dialects.workers_ai_results import envelope, run_result
from twinfire.gateway.errors import GenerationFailed, HttpError, fault_of
from twinfire.gateway.exchange import Exchange
from twinfire.gateway.gateway import Gateway
from twinfire.protocol.errors import InvalidRequest, Overloaded, TwinfireError, WorkerLost

_LOWEST_PRIORITY = 2**31 - 1
_TRY_AGAIN = (Overloaded, WorkerLost, GenerationFailed)


class BatchTicket(msgspec.Struct):
    """What is known of a batch that has not been computed."""

    status: str
    request_id: str
    model: str
    num_requests: int
    num_finished: int


class BatchResponse(msgspec.Struct):
    """What became of one request; `id` is its place in the batch."""

    id: int
    result: Raw
    success: bool
    external_reference: str | None
    errors: list[WorkersAiError] | UnsetType = UNSET


class BatchResult(msgspec.Struct):
    """A batch that has ended; `status` is there where not all of it was computed."""

    responses: list[BatchResponse]
    usage: Usage
    status: str | UnsetType = UNSET
    request_id: str | UnsetType = UNSET
    model: str | UnsetType = UNSET


class BatchRequests:
    """The handler of queued requests."""

    def __init__(self, gateway: Gateway, batches: Batches) -> None:
        self._gateway = gateway
        self._batches = batches
        self._decoder = msgspec.json.Decoder(ChatRequest)

    async def handle(self, exchange: Exchange, model: str, fields: Fields) -> None:
        """Answer one request."""
        batch_id = field_of(fields, "request_id", str)
        if batch_id is not None:
            state = await self._state(exchange, model, batch_id)
            if field_of(fields, "cancel", bool) and state.status in ("queued", "running"):
                await self._batches.cancel(batch_id)
                state = await self._state(exchange, model, batch_id)
        else:
            batch = await self._new_batch(exchange, model, fields)
            await self._batches.add(batch)
            count = len(batch.bodies)
            state = BatchState(batch.batch_id, model, "queued", count, 0)
        await exchange.answer(await self._described(state))

    async def _state(self, exchange: Exchange, model: str, batch_id: str) -> BatchState:
        state = await self._batches.state(batch_id, account_id_of(exchange))
        if state is None or state.model != model:
            raise HttpError(
                400,
                f"there is no batch `{batch_id[:80]}` of `{model}`",
                param="request_id",
                code="batch_not_found",
            )
        return state

    async def _described(self, state: BatchState) -> bytes:
        if state.status in ("queued", "running"):
            ticket = BatchTicket(
                state.status, state.batch_id, state.model, state.num_requests, state.num_finished
            )
            return envelope(msgspec.json.encode(ticket))
        finished = await self._batches.finished(state.batch_id)
        num_bytes = sum(len(one.outcome.result) for one in finished)
        return await self._gateway.handle_text(num_bytes, _encoded_result, state, finished)

    async def _new_batch(self, exchange: Exchange, model: str, fields: Fields) -> NewBatch:
        limits = self._batches.limits
        if len(exchange.body) > limits.max_body_bytes:
            limit = limits.max_body_bytes
            raise HttpError(413, f"a batch of {len(exchange.body)} bytes; the limit is {limit}.")
        requests = field_of(fields, "requests", list[Fields])
        if not requests:
            raise InvalidRequest(
                "A queued request needs `requests`, a list of at least one, or `request_id`.",
                "requests",
            )
        if len(requests) > limits.max_requests:
            raise InvalidRequest(
                f"`requests` has {len(requests)} entries; the limit is {limits.max_requests}.",
                "requests",
            )
        if model not in self._gateway.models.by_name:
            self._gateway.ready_model(model)
        self._gateway.accounting.check_model(exchange, model)
        bodies, references = await self._gateway.handle_text(
            len(exchange.body), self._checked, model, requests, limits
        )
        return NewBatch(
            str(uuid.uuid4()), account_id_of(exchange), model, tuple(bodies), tuple(references)
        )

    def _checked(
        self, model: str, requests: list[Fields], limits: BatchLimits
    ) -> tuple[list[bytes], list[str | None]]:
        """Return the requests as they are kept, and their names. May run on a thread."""
        bodies: list[bytes] = []
        references: list[str | None] = []
        for number, fields in enumerate(requests):
            try:
                reference = field_of(fields, "external_reference", str)
                if reference is not None and len(reference) > limits.max_reference_chars:
                    raise InvalidRequest(
                        f"`external_reference` has {len(reference)} characters; the limit is "
                        f"{limits.max_reference_chars}.",
                        "external_reference",
                    )
                if field_of(fields, "stream", bool):
                    raise InvalidRequest("`stream` cannot be queued.", "stream")
                # Only the shape: what depends on the model is told as the request's own outcome.
                decode_body(run_input(fields, model).chat_body, self._decoder)
                body = msgspec.json.encode(fields)
                body.decode()
            except UnicodeDecodeError:
                raise InvalidRequest(f"`requests[{number}]` is not UTF-8.", "requests") from None
            except InvalidRequest as error:
                param = f"requests[{number}]"
                if error.param:
                    param += f".{error.param}"
                raise InvalidRequest(
                    f"In `requests[{number}]`: {error.message}", param, error.code
                ) from None
            bodies.append(body)
            references.append(reference)
        return bodies, references


class BatchAnswers:
    """Computes queued requests as native ones of the lowest priority, which never wait."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._decoder = msgspec.json.Decoder(ChatRequest)

    async def answer(self, request: ClaimedRequest) -> RequestOutcome:
        """Compute one; Overloaded, WorkerLost or GenerationFailed when it may be tried again."""
        fields = read_fields(request.body) | {
            "priority": Raw(b"%d" % _LOWEST_PRIORITY),
            "rejectIfBusy": Raw(b"true"),
        }
        fields.pop("options", None)
        exchange = detached_exchange(
            self._gateway.settings, f"/ai/run/{request.model}", _headers(request)
        )
        # Whatever has no result is put back or given up, and nobody pays for it.
        exchange.abort(Overloaded("the queued request was put back"))
        try:
            exchange.identity = await self._identity(request.account_id)
            job = await prepare_run(self._gateway, exchange, self._decoder, fields, request.model)
            answer = await collect_chat(exchange, job)
        except _TRY_AGAIN:
            raise
        except HttpError as error:
            if error.status == 429:
                raise Overloaded(error.message, _retry_after_s(error)) from None
            if error.status == 503:
                raise WorkerLost(error.message) from None
            return self.failure(request, error)
        except TwinfireError as error:
            return self.failure(request, error)
        result = await self._gateway.handle_text(answer.num_prompt_rows, run_result, job, answer)
        used = answer.usage
        return RequestOutcome(
            is_success=True,
            result=result,
            num_prompt_tokens=used.prompt_tokens,
            num_cached_tokens=used.prompt_tokens_details.cached_tokens,
            num_output_tokens=used.completion_tokens,
        )

    async def _identity(self, account_id: str) -> Identity:
        for known in (OPEN_IDENTITY, OPERATOR_IDENTITY):
            if account_id == known.account.id:
                return known
        accounts = await self._gateway.accounting.accounts()
        account = await asyncio.to_thread(accounts.find, account_id)
        if account.disabled:
            raise HttpError(403, "The account is disabled.", code="account_disabled")
        return Identity(account)

    def failure(self, request: ClaimedRequest, error: Exception) -> RequestOutcome:
        """Return the outcome of a request that is given up."""
        told = workers_ai_error(fault_of(error), _request_id(request))
        return RequestOutcome(is_success=False, result=msgspec.json.encode(told))


def account_id_of(exchange: Exchange) -> str:
    """Return whose batches a client sees."""
    return exchange.account.id


def _headers(request: ClaimedRequest) -> Mapping[str, str]:
    # Requests of a batch often begin alike, so they go where its cache is.
    return {"x-request-id": _request_id(request), "x-session-affinity": request.batch_id}


def _retry_after_s(error: HttpError) -> float:
    return float(dict(error.headers).get("retry-after", "1"))


def _request_id(request: ClaimedRequest) -> str:
    return f"{request.batch_id}-{request.number}"


def _encoded_result(state: BatchState, finished: list[FinishedRequest]) -> bytes:
    outcomes = [one.outcome for one in finished]
    result = BatchResult(
        responses=[_response(one) for one in finished],
        usage=usage(
            sum(one.num_prompt_tokens for one in outcomes),
            sum(one.num_output_tokens for one in outcomes),
            sum(one.num_cached_tokens for one in outcomes),
        ),
    )
    if state.status != "done":
        result.status, result.request_id, result.model = state.status, state.batch_id, state.model
    return envelope(msgspec.json.encode(result))


def _response(finished: FinishedRequest) -> BatchResponse:
    outcome = finished.outcome
    response = BatchResponse(finished.number, Raw(b"{}"), outcome.is_success, finished.reference)
    if outcome.is_success:
        response.result = Raw(outcome.result)
    else:
        response.errors = [msgspec.json.decode(outcome.result, type=WorkersAiError)]
    return response
