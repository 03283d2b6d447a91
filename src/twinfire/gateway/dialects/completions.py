"""`POST /v1/completions`."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from msgspec import UNSET

from twinfire.gateway.dialects.completion_stream import CompletionStream
from twinfire.gateway.dialects.echo import EchoedPrompt, echo_prompt
from twinfire.gateway.dialects.generate import (
    CollectedAnswer,
    answer_id,
    checked_cache_salt,
    collect,
    start_generation,
    stream,
    usage,
    usage_of,
    wants_continuous_usage,
    wants_usage,
)
from twinfire.gateway.dialects.json_body import decode_body
from twinfire.gateway.dialects.logprobs import LogprobFormat
from twinfire.gateway.dialects.not_served import refuse_unserved_completion
from twinfire.gateway.dialects.output_grammar import requested_grammar
from twinfire.gateway.dialects.prompts import (
    TextOrIds,
    check_min_tokens,
    completion_prompts,
    output_bound,
    prompt_ids,
)
from twinfire.gateway.dialects.requests import CompletionRequest
from twinfire.gateway.dialects.responses import CompletionChoice, CompletionResponse, Usage
from twinfire.gateway.dialects.sampling import (
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
from twinfire.gateway.text.choice_text import ShownToken
from twinfire.gateway.text.token_logprobs import TokenLogprob
from twinfire.gateway.text_generation import GenerationJob, with_drawn_seeds
from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.sampling import SamplingParams

DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class CompletionJob:
    """A completions request that has passed every check."""

    request: CompletionRequest
    model: ReadyModel
    generation: GenerationJob
    echoes: Sequence[EchoedPrompt] | None
    """One per prompt, where the answers begin with their prompts."""
    logprob_format: LogprobFormat
    answer_id: str
    created_s: int


class Completions:
    """The handler."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._decoder = msgspec.json.Decoder(CompletionRequest)

    async def __call__(self, exchange: Exchange) -> None:
        """Answer one request."""
        request = decode_body(exchange.body, self._decoder)
        model = self._gateway.ready_model(request.model)
        job = await self._prepare(request, model, exchange)
        generation = await start_generation(self._gateway, model, exchange, request, job.generation)
        prompts, meter = job.generation.prompts, generation.meter

        def usage_so_far(index: int, num_output_tokens: int) -> Usage:
            prompt = prompts[index // job.generation.n]
            return usage(len(prompt), num_output_tokens, meter.num_cached_tokens)

        if request.stream:
            frame = ChunkFrame(
                answer_id=job.answer_id,
                kind="text_completion",
                created_s=job.created_s,
                model=model.name,
                fingerprint=model.fingerprint,
                usage_so_far=usage_so_far if wants_continuous_usage(request) else None,
            )
            writer = CompletionStream(
                frame,
                job.logprob_format,
                n=job.generation.n,
                logprobs=request.logprobs is not None,
                echoes=job.echoes,
                prompts=prompts if request.return_token_ids else None,
                total_usage=(lambda: usage_of(meter)) if wants_usage(request) else None,
            )
            await stream(exchange, generation, writer)
        else:
            num_choices = len(prompts) * job.generation.n
            answer = await collect(exchange, generation, len(prompts), num_choices)
            body = await self._gateway.handle_text(answer.num_prompt_rows, _encoded, job, answer)
            await exchange.answer(body)

    async def _prepare(
        self, request: CompletionRequest, model: ReadyModel, exchange: Exchange
    ) -> CompletionJob:
        limits = self._gateway.settings.limits
        check_streaming(request)
        refuse_unserved_completion(request)
        prompts = completion_prompts(request, limits)
        num_choices = len(prompts) * (request.n or 1)
        if num_choices > limits.max_choices:
            raise InvalidRequest(
                f"`n` times the prompts makes {num_choices} choices; the limit is "
                f"{limits.max_choices}.",
                "n",
            )
        options = text_options(
            request,
            limits,
            want_tokens=request.logprobs is not None or bool(request.return_token_ids),
        )
        reply_id = answer_id("cmpl-", exchange, request)
        cache_salt = checked_cache_salt(request, limits)
        sampling = _sampling(request, model, limits)
        grammar = await requested_grammar(self._gateway, request, model)
        sampling = msgspec.structs.replace(sampling, grammar=grammar)
        ids = await self._gateway.handle_text(
            sum(map(len, prompts)), _all_prompt_ids, prompts, request, model
        )
        job = GenerationJob(
            prompts=ids,
            sampling=_bounded(sampling, ids, request, model),
            text=options,
            priority=request.priority or 0,
            cache_salt=cache_salt,
        )
        echoes = None
        if request.echo:
            echoes = await self._gateway.handle_text(
                sum(map(len, ids)), _echo_prompts, prompts, ids, model, options.skip_special_tokens
            )
        as_ids = bool(request.return_tokens_as_token_ids)
        logprob_format = LogprobFormat(model.text.vocabulary, as_ids)
        created_s = int(time.time())
        return CompletionJob(request, model, job, echoes, logprob_format, reply_id, created_s)


def _sampling(
    request: CompletionRequest, model: ReadyModel, limits: RequestLimits
) -> SamplingParams:
    logprobs = num_logprobs("logprobs", request.logprobs, model, limits)
    prompt_logprobs = num_logprobs("prompt_logprobs", request.prompt_logprobs, model, limits)
    if request.echo:
        prompt_logprobs = max(prompt_logprobs, logprobs)
    return resolve_sampling(
        request,
        model,
        limits,
        max_tokens=0,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _bounded(
    sampling: SamplingParams,
    prompts: Sequence[array[int]],
    request: CompletionRequest,
    model: ReadyModel,
) -> list[SamplingParams]:
    """Return the sampling of each prompt with the output that fits behind it."""
    resolved: list[SamplingParams] = []
    seeded = with_drawn_seeds(sampling, len(prompts), request.seed is not None)
    for prompt, prompt_sampling in zip(prompts, seeded, strict=True):
        max_tokens = output_bound(
            len(prompt),
            request.max_tokens,
            model,
            default=DEFAULT_MAX_TOKENS,
            param="max_tokens",
            prompt_param="prompt",
        )
        check_min_tokens(request, max_tokens)
        resolved.append(msgspec.structs.replace(prompt_sampling, max_tokens=max_tokens))
    return resolved


def _all_prompt_ids(
    prompts: Sequence[TextOrIds], request: CompletionRequest, model: ReadyModel
) -> list[array[int]]:
    return [prompt_ids(prompt, request, model, request.max_tokens) for prompt in prompts]


def _echo_prompts(
    prompts: Sequence[TextOrIds],
    ids: Sequence[array[int]],
    model: ReadyModel,
    skip_special_tokens: bool,
) -> list[EchoedPrompt]:
    return [
        echo_prompt(prompt, its_ids, model.text.vocabulary, skip_special_tokens)
        for prompt, its_ids in zip(prompts, ids, strict=True)
    ]


def _encoded(job: CompletionJob, answer: CollectedAnswer) -> bytes:
    response = CompletionResponse(
        id=job.answer_id,
        object="text_completion",
        created=job.created_s,
        model=job.model.name,
        choices=[_choice(job, answer, index) for index in range(len(answer.choices))],
        usage=answer.usage,
        system_fingerprint=job.model.fingerprint,
    )
    return msgspec.json.encode(response)


def _choice(job: CompletionJob, answer: CollectedAnswer, index: int) -> CompletionChoice:
    request = job.request
    choice = answer.choices[index]
    prompt_index = index // job.generation.n
    rows = answer.prompt_logprobs[prompt_index]
    echo = None if job.echoes is None else job.echoes[prompt_index]
    text = choice.text if echo is None else echo.text + choice.text
    logprobs = None
    if request.logprobs is not None:
        tokens = _with_echo(echo, rows, choice.tokens)
        logprobs = job.logprob_format.completion(tokens)
    prompt_logprobs = None
    if request.prompt_logprobs is not None and rows is not None:
        prompt_logprobs = job.logprob_format.prompt(rows)
    prompt = job.generation.prompts[prompt_index]
    return CompletionChoice(
        index=index,
        text=text,
        logprobs=logprobs,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        token_ids=choice.token_ids if request.return_token_ids else UNSET,
        prompt_token_ids=list(prompt) if request.return_token_ids else UNSET,
        prompt_logprobs=UNSET if prompt_logprobs is None else prompt_logprobs,
    )


def _with_echo(
    echo: EchoedPrompt | None,
    rows: Sequence[TokenLogprob | None] | None,
    tokens: Sequence[ShownToken],
) -> list[ShownToken]:
    """Return the echoed prompt's tokens and the output's, which begin where its text ends."""
    if echo is None:
        return list(tokens)
    return [*echo.tokens(rows), *echo.shifted(tokens)]
