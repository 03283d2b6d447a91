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
from twinfire.gateway.dialects.chat_stream import ChatStream, finish_word
from twinfire.gateway.dialects.json_body import decode_body
from twinfire.gateway.dialects.requests import ChatRequest
from twinfire.gateway.dialects.responses import (
    CalledFunction,
    ChatChoice,
    ChatMessage,
    ChatResponse,
    ToolCall,
)
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
    is_legacy = job.tools is not None and job.tools.is_legacy
    logprobs = None
    if job.num_top_logprobs is not None:
        logprobs = job.logprob_format.chat(choice.tokens, job.num_top_logprobs)
    return ChatChoice(
        index=choice.index,
        message=_message(choice, is_legacy),
        logprobs=logprobs,
        finish_reason=finish_word(choice.finish_reason, is_legacy),
        stop_reason=choice.stop_reason,
        token_ids=choice.token_ids if job.request.return_token_ids else UNSET,
    )


def _message(choice: AnsweredChoice, is_legacy: bool) -> ChatMessage:
    message = ChatMessage("assistant", choice.content)
    if choice.reasoning is not None:
        message.reasoning_content = message.reasoning = choice.reasoning
    if not choice.tool_calls:
        return message
    if is_legacy:
        (call,) = choice.tool_calls
        message.function_call = CalledFunction(call.name, call.arguments)
    else:
        message.tool_calls = [
            ToolCall(call.call_id, CalledFunction(call.name, call.arguments))
            for call in choice.tool_calls
        ]
    return message
