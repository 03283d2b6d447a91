"""A chat request of any dialect, checked: all that can be refused is refused before the 200."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass

import msgspec

from twinfire.gateway.dialects.answer_plan import answer_plan, planned_options
from twinfire.gateway.dialects.chat_grammar import chat_grammar
from twinfire.gateway.dialects.conversation import (
    check_template_fields,
    conversation_chars,
    conversation_ids,
    message_text,
    untemplated_ids,
)
from twinfire.gateway.dialects.generate import answer_id, checked_cache_salt
from twinfire.gateway.dialects.logprobs import LogprobFormat
from twinfire.gateway.dialects.not_served import refuse_unserved_chat
from twinfire.gateway.dialects.prediction import predicted_output
from twinfire.gateway.dialects.prompts import check_min_tokens, output_bound, truncate
from twinfire.gateway.dialects.requests import ChatRequest
from twinfire.gateway.dialects.sampling import (
    NO_LOGPROBS,
    check_streaming,
    num_logprobs,
    resolve_sampling,
    text_options,
)
from twinfire.gateway.dialects.tool_grammar import marker_ids
from twinfire.gateway.dialects.tools import RequestedTools, requested_tools
from twinfire.gateway.exchange import Exchange
from twinfire.gateway.gateway import Gateway
from twinfire.gateway.hosted_model import ReadyModel
from twinfire.gateway.settings import RequestLimits
from twinfire.gateway.text.answer_splitter import AnswerPlan
from twinfire.gateway.text_generation import GenerationJob, with_drawn_seeds
from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class ChatJob:
    """A chat request that has passed every check."""

    gateway: Gateway
    request: ChatRequest
    model: ReadyModel
    generation: GenerationJob
    answer_id: str
    created_s: int
    echoed: str
    """The final message's text, where the answer begins with it."""
    num_top_logprobs: int | None
    """Alternatives per token, None when no log-probabilities are asked for."""
    tools: RequestedTools | None = None
    plan: AnswerPlan | None = None
    """What answers may consist of besides text; None for nothing."""

    @property
    def prompt(self) -> array[int]:
        """The only prompt."""
        return self.generation.prompts[0]

    @property
    def n(self) -> int:
        """How many choices."""
        return self.generation.n

    @property
    def logprob_format(self) -> LogprobFormat:
        """How its tokens are written."""
        as_ids = bool(self.request.return_tokens_as_token_ids)
        return LogprobFormat(self.model.text.vocabulary, as_ids)


async def prepare_chat(
    gateway: Gateway,
    exchange: Exchange,
    request: ChatRequest,
    *,
    id_prefix: str = "chatcmpl-",
    is_templated: bool = True,
) -> ChatJob:
    """Return the request as a job; InvalidRequest or HttpError with what is wrong with it.

    Without a template the messages' text is the prompt, as it is.
    """
    model = gateway.ready_model(request.model)
    settings = gateway.settings
    limits = settings.limits
    check_streaming(request)
    refuse_unserved_chat(request)
    check_template_fields(request, request.messages, settings)
    tools = requested_tools(request)
    num_top = _num_top_logprobs(request, model, limits)
    num_prompt = num_logprobs("prompt_logprobs", request.prompt_logprobs, model, limits)
    reply_id = answer_id(id_prefix, exchange, request)
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
    prompt = await gateway.handle_text(
        conversation_chars(request.messages, len(tools.tools) if tools else 0),
        conversation_ids if is_templated else untemplated_ids,
        request,
        request.messages,
        model,
        tools.definitions if tools else None,
        add_special_tokens=bool(request.add_special_tokens)
        or (not is_templated and request.add_special_tokens is None),
        may_be_long=request.truncate_prompt_tokens is not None,
    )
    if not prompt:
        raise InvalidRequest("The rendered `messages` have no tokens.", "messages")
    prompt = truncate(prompt, request, model, asked)
    prediction = await predicted_output(gateway, request.prediction, model)
    max_tokens = output_bound(
        len(prompt), asked, model, default=None, param=param, prompt_param="messages"
    )
    check_min_tokens(request, max_tokens)
    plan = answer_plan(request, tools, model.text, prompt) if is_templated else None
    if plan is not None:
        options = planned_options(plan, options, model.text)
    grammar = await chat_grammar(gateway, request, tools, model, plan)
    sampling = _without_calls(sampling, tools, model)
    sampling = msgspec.structs.replace(sampling, max_tokens=max_tokens, grammar=grammar)
    generation = GenerationJob(
        prompts=[prompt],
        sampling=with_drawn_seeds(sampling, 1, request.seed is not None),
        text=options,
        priority=request.priority or 0,
        cache_salt=cache_salt,
        prediction=prediction,
    )
    return ChatJob(
        gateway=gateway,
        request=request,
        model=model,
        generation=generation,
        answer_id=reply_id,
        created_s=int(time.time()),
        echoed=_echoed(request),
        num_top_logprobs=num_top,
        tools=tools,
        plan=plan,
    )


def _without_calls(
    sampling: SamplingParams, tools: RequestedTools | None, model: ReadyModel
) -> SamplingParams:
    """Forbid the tokens that mark calls where none may come, though the prompt shows tools."""
    tool_format = model.text.formats.tools
    if tools is None or tools.may_be_called or tool_format is None:
        return sampling
    marks = marker_ids(tool_format.markers, model).values()
    bad_words = sampling.bad_words + tuple((token_id,) for token_id in marks)
    return msgspec.structs.replace(sampling, bad_words=bad_words)


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
