"""`POST /v1/chat/completions`."""

from __future__ import annotations

import msgspec
from msgspec import UNSET

from twinfire.gateway.dialects.chat_answer import (
    AnsweredChoice,
    ChatAnswer,
    collect_chat,
    stream_chat,
)
from twinfire.gateway.dialects.chat_job import ChatJob, prepare_chat
from twinfire.gateway.dialects.chat_stream import ChatStream
from twinfire.gateway.dialects.json_body import decode_body
from twinfire.gateway.dialects.requests import ChatRequest
from twinfire.gateway.dialects.responses import ChatChoice, ChatMessage, ChatResponse
from twinfire.gateway.exchange import Exchange
from twinfire.gateway.gateway import Gateway


class ChatCompletions:
    """The handler."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._decoder = msgspec.json.Decoder(ChatRequest)

    async def __call__(self, exchange: Exchange) -> None:
        """Answer one request."""
        request = decode_body(exchange.body, self._decoder)
        job = await prepare_chat(self._gateway, exchange, request)
        if request.stream:
            await stream_chat(exchange, job, ChatStream(job))
        else:
            answer = await collect_chat(exchange, job)
            body = await self._gateway.handle_text(answer.num_prompt_rows, _encoded, job, answer)
            await exchange.answer(body)


def _encoded(job: ChatJob, answer: ChatAnswer) -> bytes:
    return msgspec.json.encode(chat_response(job, answer))


def chat_response(job: ChatJob, answer: ChatAnswer) -> ChatResponse:
    """Return an answer in OpenAI's shape."""
    prompt_rows = answer.prompt_logprobs
    return ChatResponse(
        id=job.answer_id,
        object="chat.completion",
        created=job.created_s,
        model=job.model.name,
        choices=[_choice(job, choice) for choice in answer.choices],
        usage=answer.usage,
        system_fingerprint=job.model.fingerprint,
        prompt_logprobs=UNSET if prompt_rows is None else job.logprob_format.prompt(prompt_rows),
        prompt_token_ids=list(job.prompt) if job.request.return_token_ids else UNSET,
    )


def _choice(job: ChatJob, choice: AnsweredChoice) -> ChatChoice:
    logprobs = None
    if job.num_top_logprobs is not None:
        logprobs = job.logprob_format.chat(choice.tokens, job.num_top_logprobs)
    return ChatChoice(
        index=choice.index,
        message=ChatMessage("assistant", choice.content),
        logprobs=logprobs,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        token_ids=choice.token_ids if job.request.return_token_ids else UNSET,
    )
