"""`POST /ai/run`: one model's native input, answered natively or in OpenAI's shape."""

from __future__ import annotations

import msgspec

from twinfire.gateway.dialects.chat_answer import AnswerWriter, collect_chat, stream_chat
from twinfire.gateway.dialects.chat_job import ChatJob, prepare_chat
from twinfire.gateway.dialects.json_body import decode_body
from twinfire.gateway.dialects.requests import ChatRequest
from twinfire.gateway.dialects.workers_ai_input import (
    Fields,
    read_fields,
    run_input,
    unwrap,
)
from twinfire.gateway.dialects.workers_ai_results import envelope, run_result
from twinfire.gateway.dialects.workers_ai_shapes import streams_openai_chunks
from twinfire.gateway.dialects.workers_ai_stream import NativeStream, OpenAiRunStream
from twinfire.gateway.errors import HttpError
from twinfire.gateway.exchange import Exchange
from twinfire.gateway.gateway import Gateway

ID_PREFIX = "chatcmpl-"
_MAX_MODEL_CHARS = 512


class WorkersAiRun:
    """The handler."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._decoder = msgspec.json.Decoder(ChatRequest)

    async def __call__(self, exchange: Exchange) -> None:
        """Answer one request."""
        fields = read_fields(exchange.body)
        model = exchange.path_params.get("model")
        if model is None:
            model, fields = unwrap(fields)
        _check_model_id(model)
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


async def prepare_run(
    gateway: Gateway,
    exchange: Exchange,
    decoder: msgspec.json.Decoder[ChatRequest],
    fields: Fields,
    model: str,
) -> ChatJob:
    """Return a native request as a job; InvalidRequest or HttpError with what is wrong with it."""
    given = run_input(fields, model)
    request = decode_body(given.chat_body, decoder)
    ready = gateway.ready_model(model)
    # A model without a template takes the text as it is.
    is_raw = given.is_raw or (given.is_prompt and ready.text.template is None)
    return await prepare_chat(
        gateway, exchange, request, id_prefix=ID_PREFIX, is_templated=not is_raw
    )


def _check_model_id(model: str) -> None:
    if not model or len(model) > _MAX_MODEL_CHARS or not model.isprintable():
        raise HttpError(404, f"{model[:80]!r}", param="model", code="model_id_invalid")
