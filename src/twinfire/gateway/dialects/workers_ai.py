"""`POST /ai/run`: one model's native input, answered natively or in OpenAI's shape."""

from __future__ import annotations

import msgspec

from twinfire.gateway.dialects.chat_answer import AnswerWriter, collect_chat, stream_chat
from twinfire.gateway.dialects.chat_job import ChatJob
from twinfire.gateway.dialects.requests import ChatRequest
from twinfire.gateway.dialects.workers_ai_batches import BatchRequests
from twinfire.gateway.dialects.workers_ai_input import (
    read_fields,
    unwrap,
)
from twinfire.gateway.dialects.workers_ai_job import prepare_run
from twinfire.gateway.dialects.workers_ai_results import envelope, run_result
from twinfire.gateway.dialects.workers_ai_shapes import streams_openai_chunks
from twinfire.gateway.dialects.workers_ai_stream import NativeStream, OpenAiRunStream
from twinfire.gateway.errors import HttpError
from twinfire.gateway.exchange import Exchange
from twinfire.gateway.gateway import Gateway
from twinfire.protocol.errors import InvalidRequest

_MAX_MODEL_CHARS = 512


class WorkersAiRun:
    """The handler."""

    def __init__(self, gateway: Gateway, batches: BatchRequests) -> None:
        self._gateway = gateway
        self._batches = batches
        self._decoder = msgspec.json.Decoder(ChatRequest)

    async def __call__(self, exchange: Exchange) -> None:
        """Answer one request, or take some into the queue."""
        fields = read_fields(exchange.body)
        model = exchange.path_params.get("model")
        if model is None:
            model, fields = unwrap(fields)
        _check_model_id(model)
        if _is_queued(exchange):
            await self._batches.handle(exchange, model, fields)
            return
        job = await prepare_run(self._gateway, exchange, self._decoder, fields, model)
        if job.request.stream:
            await stream_chat(exchange, job, self._writer(job))
        else:
            answer = await collect_chat(exchange, job)
            result = await self._gateway.handle_text(
                answer.num_prompt_rows, run_result, job, answer
            )
            await exchange.answer(envelope(result))

    def _writer(self, job: ChatJob) -> AnswerWriter:
        asked_for_more = job.n > 1 or job.num_top_logprobs is not None
        style = self._gateway.settings.workers_ai_streams
        if asked_for_more or streams_openai_chunks(job.model.name, style):
            return OpenAiRunStream(job)
        return NativeStream(job)


def _is_queued(exchange: Exchange) -> bool:
    asked = exchange.query.get("queueRequest", "false").lower()
    if asked not in ("true", "false", "1", "0"):
        raise InvalidRequest("`queueRequest` must be true or false.", "queueRequest")
    return asked in ("true", "1")


def _check_model_id(model: str) -> None:
    if not model or len(model) > _MAX_MODEL_CHARS or not model.isprintable():
        raise HttpError(404, f"{model[:80]!r}", param="model", code="model_id_invalid")
