"""`POST /v1/chat/completions`."""

from __future__ import annotations

import msgspec
from msgspec import UNSET

from twinfire.gateway.dialects.chat_answer import (
    AnsweredChoice,
    AnswerWriter,
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
    Usage,
)
from twinfire.gateway.dialects.stream_padding import StreamPadding
from twinfire.gateway.exchange import Exchange
from twinfire.gateway.gateway import Gateway
from twinfire.gateway.text.answer_parts import AnswerDelta
from twinfire.gateway.text_generation import PromptReady


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
            await stream_chat(exchange, job, _writer(job))
        else:
            answer = await collect_chat(exchange, job)
            body = await self._gateway.handle_text(answer.num_prompt_rows, _encoded, job, answer)
            await exchange.answer(body)


def _writer(job: ChatJob) -> AnswerWriter:
    options = job.request.stream_options
    is_padded = options is not None and options.include_obfuscation is True
    return _ObfuscatedStream(ChatStream(job)) if is_padded else ChatStream(job)


class _ObfuscatedStream:
    """Pads another writer's events as OpenAI does."""

    def __init__(self, events: AnswerWriter) -> None:
        self._events = events
        self._padding = StreamPadding("obfuscation")

    def prompt_ready(self, ready: PromptReady, usage: Usage) -> bytes:
        """Return what opens the choices."""
        return self._padding.pad(self._events.prompt_ready(ready, usage))

    def delta(self, delta: AnswerDelta) -> bytes:
        """Return what a choice gained."""
        return self._padding.pad(self._events.delta(delta))

    def end(self, usage: Usage) -> bytes:
        """Return the closing events."""
        return self._padding.pad(self._events.end(usage))


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
