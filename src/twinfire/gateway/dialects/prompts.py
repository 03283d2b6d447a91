"""Prompts as token ids, and how many tokens may follow them.

The functions here are pure and may run on a thread: rendering and tokenising of a long prompt takes
longer than an event loop may be held.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from twinfire.gateway.dialects.requests import CompletionRequest, SamplingFields
from twinfire.gateway.dialects.sampling import check_token_ids
from twinfire.gateway.hosted_model import ReadyModel
from twinfire.gateway.settings import RequestLimits
from twinfire.protocol.errors import InvalidRequest

TOO_LONG = "context_length_exceeded"
TextOrIds = str | Sequence[int]


def completion_prompts(request: CompletionRequest, limits: RequestLimits) -> list[TextOrIds]:
    """Return the prompts of a completions request, each a text or token ids."""
    prompt = request.prompt
    if prompt is None:
        raise InvalidRequest("`prompt` is required.", "prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("`prompt` must not be empty.", "prompt")
    if all(isinstance(item, int) for item in prompt):
        return [[item for item in prompt if isinstance(item, int)]]
    if len(prompt) > limits.max_prompts:
        raise InvalidRequest(
            f"`prompt` has {len(prompt)} prompts; the limit is {limits.max_prompts}.", "prompt"
        )
    texts = [item for item in prompt if isinstance(item, str)]
    if len(texts) == len(prompt):
        return list(texts)
    id_lists = [item for item in prompt if isinstance(item, list)]
    if len(id_lists) == len(prompt):
        return list(id_lists)
    raise InvalidRequest(
        "`prompt` must be a string, a list of strings, a list of token ids or a list of lists of "
        "token ids, not a mixture.",
        "prompt",
    )


def encode_text(
    text: str, model: ReadyModel, *, add_special_tokens: bool, may_be_long: bool, param: str
) -> array[int]:
    """Tokenise; InvalidRequest for a text that cannot fit, which is found before tokenising."""
    num_bytes = len(text.encode("utf-8", "surrogatepass"))
    if num_bytes > model.max_text_bytes and not may_be_long:
        raise InvalidRequest(
            f"`{param}` is a text of {num_bytes} bytes, which cannot fit into the model's context "
            f"of {model.max_model_len} tokens.",
            param,
            TOO_LONG,
        )
    return model.text.tokenizer.encode(text, add_special_tokens)


def prompt_ids(
    prompt: TextOrIds, request: SamplingFields, model: ReadyModel, max_tokens: int | None
) -> array[int]:
    """Return a completions prompt as ids within the vocabulary, truncated where asked."""
    if isinstance(prompt, str):
        ids = encode_text(
            prompt,
            model,
            add_special_tokens=request.add_special_tokens is not False,
            may_be_long=request.truncate_prompt_tokens is not None,
            param="prompt",
        )
    else:
        check_token_ids("prompt", prompt, model.worker.vocab_size)
        ids = array("I", prompt)
    if not ids:
        raise InvalidRequest("`prompt` has no tokens; at least one is needed.", "prompt")
    return truncate(ids, request, model, max_tokens)


def truncate(
    ids: array[int], request: SamplingFields, model: ReadyModel, max_tokens: int | None
) -> array[int]:
    """Apply `truncate_prompt_tokens`; -1 keeps as much as leaves room for the output."""
    limit = request.truncate_prompt_tokens
    if limit is None:
        return ids
    if limit == 0 or limit > model.max_model_len:
        raise InvalidRequest(
            f"`truncate_prompt_tokens` must be -1 or from 1 to {model.max_model_len}, got {limit}.",
            "truncate_prompt_tokens",
        )
    if limit == -1:
        limit = max(1, model.max_model_len - max(1, max_tokens or 1))
    if len(ids) <= limit:
        return ids
    return ids[:limit] if request.truncation_side == "right" else ids[-limit:]


def output_bound(
    num_prompt_tokens: int,
    max_tokens: int | None,
    model: ReadyModel,
    *,
    default: int | None,
    param: str,
    prompt_param: str,
) -> int:
    """Return how many tokens may follow a prompt.

    `default` bounds a request that does not say, None the rest of the window. Raises
    InvalidRequest when prompt and asked output do not fit together.
    """
    window = model.max_model_len
    room = window - num_prompt_tokens
    if room < 0 or (room == 0 and max_tokens != 0):
        raise InvalidRequest(
            f"The prompt has {num_prompt_tokens} tokens; the model's context is {window} tokens, "
            "prompt and output together.",
            prompt_param,
            TOO_LONG,
        )
    if max_tokens is None:
        return room if default is None else min(default, room)
    if max_tokens > room:
        raise InvalidRequest(
            f"`{param}` is {max_tokens} and the prompt has {num_prompt_tokens} tokens, which is "
            f"more than the model's context of {window} tokens.",
            param,
            TOO_LONG,
        )
    return max_tokens


def check_min_tokens(request: SamplingFields, max_tokens: int) -> None:
    """Refuse `min_tokens` that the output cannot reach."""
    if request.min_tokens is not None and request.min_tokens > max_tokens:
        raise InvalidRequest(
            f"`min_tokens` is {request.min_tokens}, more than the output may have ({max_tokens}).",
            "min_tokens",
        )
