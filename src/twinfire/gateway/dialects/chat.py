"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass

import msgspec
from msgspec import UNSET

from twinfire.gateway.dialects.chat_stream import ChatStream
from twinfire.gateway.dialects.conversation import (
    check_template_fields,
    conversation_chars,
    conversation_ids,
    message_text,
)
from twinfire.gateway.dialects.generate import (
    CollectedAnswer,
    CollectedChoice,
    answer_id,
    checked_cache_salt,
    collect,
    start_generation,
    stream,
    wants_continuous_usage,
    wants_usage,
)
from twinfire.gateway.dialects.json_body import decode_body
from twinfire.gateway.dialects.logprobs import LogprobFormat
from twinfire.gateway.dialects.not_served import refuse_unserved_chat
from twinfire.gateway.dialects.prompts import check_min_tokens, output_bound, truncate
from twinfire.gateway.dialects.requests import ChatRequest
from twinfire.gateway.dialects.responses import ChatChoice, ChatMessage, ChatResponse
from twinfire.gateway.dialects.sampling import (
    NO_LOGPROBS,
    check_streaming,
    num_logprobs,
    resolve_sampling,
    text_options,
)
from twinfire.gateway.dialects.sse import ChunkFrame
from twinfire.gateway.exchange import Exchange
from twinfire.gateway.gateway import Gateway
from twinfire.gateway.hosted_model import ReadyModel
from twinfire.gateway.settings import RequestLimits
from twinfire.gateway.text_generation import GenerationJob, with_drawn_seeds
from twinfire.protocol.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class ChatJob:
    """A chat request that has passed every check."""

    request: ChatRequest
    model: ReadyModel
    generation: GenerationJob
    answer_id: str
    created_s: int
    echoed: str
    """The final message's text, where the answer begins with it."""
    num_top_logprobs: int | None
    """Alternatives per token, None when no log-probabilities are asked for."""

    @property
    def prompt(self) -> array[int]:
        """The only prompt."""
        return self.generation.prompts[0]

    @property
    def logprob_format(self) -> LogprobFormat:
        """How its tokens are written."""
        as_ids = bool(self.request.return_tokens_as_token_ids)
        return LogprobFormat(self.model.text.vocabulary, as_ids)


class ChatCompletions:
    """The handler."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._decoder = msgspec.json.Decoder(ChatRequest)

    async def __call__(self, exchange: Exchange) -> None:
        """Answer one request."""
        request = decode_body(exchange.body, self._decoder)
        model = self._gateway.ready_model(request.model)
        job = await self._prepare(request, model, exchange)
        generation = start_generation(model, exchange, request, job.generation)
        if request.stream:
            frame = ChunkFrame(
                answer_id=job.answer_id,
                kind="chat.completion.chunk",
                created_s=job.created_s,
                model=model.name,
                fingerprint=model.fingerprint,
                meter=generation.meter,
                prompt_lengths=[len(job.prompt)],
                n=job.generation.n,
                continuous_usage=wants_continuous_usage(request),
            )
            writer = ChatStream(
                frame,
                job.logprob_format,
                n=job.generation.n,
                num_top_logprobs=job.num_top_logprobs,
                token_ids=bool(request.return_token_ids),
                prompt_token_ids=job.prompt if request.return_token_ids else None,
                echoed=job.echoed,
            )
            await stream(exchange, generation, writer, wants_usage(request))
        else:
            answer = await collect(
                exchange, generation, num_prompts=1, num_choices=job.generation.n
            )
            body = await self._gateway.handle_text(answer.num_prompt_rows, _encoded, job, answer)
            await exchange.answer(body)

    async def _prepare(
        self, request: ChatRequest, model: ReadyModel, exchange: Exchange
    ) -> ChatJob:
        settings = self._gateway.settings
        limits = settings.limits
        check_streaming(request)
        refuse_unserved_chat(request)
        check_template_fields(request, request.messages, settings)
        num_top = _num_top_logprobs(request, model, limits)
        num_prompt = num_logprobs("prompt_logprobs", request.prompt_logprobs, model, limits)
        reply_id = answer_id("chatcmpl-", exchange, request)
        cache_salt = checked_cache_salt(request, limits)
        options = text_options(
            request, limits, want_tokens=bool(request.logprobs or request.return_token_ids)
        )
        param, asked = _asked_output(request)
        sampling = resolve_sampling(
            request,
            model,
            limits,
            max_tokens=0,
            logprobs=NO_LOGPROBS if num_top is None else num_top,
            prompt_logprobs=num_prompt,
        )
        prompt = await self._gateway.handle_text(
            conversation_chars(request.messages),
            conversation_ids,
            request,
            request.messages,
            model,
            add_special_tokens=bool(request.add_special_tokens),
            may_be_long=request.truncate_prompt_tokens is not None,
        )
        if not prompt:
            raise InvalidRequest("The rendered `messages` have no tokens.", "messages")
        prompt = truncate(prompt, request, model, asked)
        max_tokens = output_bound(
            len(prompt), asked, model, default=None, param=param, prompt_param="messages"
        )
        check_min_tokens(request, max_tokens)
        sampling = msgspec.structs.replace(sampling, max_tokens=max_tokens)
        generation = GenerationJob(
            prompts=[prompt],
            sampling=with_drawn_seeds(sampling, 1, request.seed is not None),
            text=options,
            priority=request.priority or 0,
            cache_salt=cache_salt,
        )
        return ChatJob(
            request, model, generation, reply_id, int(time.time()), _echoed(request), num_top
        )


def _num_top_logprobs(request: ChatRequest, model: ReadyModel, limits: RequestLimits) -> int | None:
    if not request.logprobs:
        if request.top_logprobs is not None:
            raise InvalidRequest("`top_logprobs` needs `logprobs` to be true.", "top_logprobs")
        return None
    return num_logprobs("top_logprobs", request.top_logprobs or 0, model, limits)


def _asked_output(request: ChatRequest) -> tuple[str, int | None]:
    """Return the field that bounds the output and its value."""
    if request.max_completion_tokens is not None:
        return "max_completion_tokens", request.max_completion_tokens
    return "max_tokens", request.max_tokens


def _echoed(request: ChatRequest) -> str:
    last = request.messages[-1]
    if not request.echo or last.role != "assistant":
        return ""
    return message_text(last, len(request.messages) - 1)


def _encoded(job: ChatJob, answer: CollectedAnswer) -> bytes:
    prompt_rows = answer.prompt_logprobs[0]
    response = ChatResponse(
        id=job.answer_id,
        object="chat.completion",
        created=job.created_s,
        model=job.model.name,
        choices=[_choice(job, index, choice) for index, choice in enumerate(answer.choices)],
        usage=answer.usage,
        system_fingerprint=job.model.fingerprint,
        prompt_logprobs=UNSET if prompt_rows is None else job.logprob_format.prompt(prompt_rows),
        prompt_token_ids=list(job.prompt) if job.request.return_token_ids else UNSET,
    )
    return msgspec.json.encode(response)


def _choice(job: ChatJob, index: int, choice: CollectedChoice) -> ChatChoice:
    request = job.request
    logprobs = None
    if job.num_top_logprobs is not None:
        logprobs = job.logprob_format.chat(choice.tokens, job.num_top_logprobs)
    return ChatChoice(
        index=index,
        message=ChatMessage("assistant", job.echoed + choice.text),
        logprobs=logprobs,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        token_ids=choice.token_ids if request.return_token_ids else UNSET,
    )
