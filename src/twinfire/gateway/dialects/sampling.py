"""From a request's fields to `SamplingParams`: defaults, limits, and what depends on the model."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TypeVar

from twinfire.gateway.dialects.requests import SamplingFields
from twinfire.gateway.hosted_model import ReadyModel
from twinfire.gateway.settings import RequestLimits
from twinfire.gateway.text.choice_text import TextOptions
from twinfire.gateway.text.stop_strings import StopStrings
from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.sampling import SamplingParams

_SEED_MASK = 2**64 - 1
NO_LOGPROBS = -1

N = TypeVar("N", int, float)


def check_streaming(request: SamplingFields) -> None:
    """Refuse what only makes sense with, or without, a stream."""
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("`stream_options` needs `stream` to be true.", "stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidRequest("`prompt_logprobs` is not available in a stream.", "prompt_logprobs")


def text_options(
    request: SamplingFields, limits: RequestLimits, *, want_tokens: bool
) -> TextOptions:
    """Return how the output becomes text."""
    stop = request.stop
    stops = [stop] if isinstance(stop, str) else (stop or [])
    _check_count("stop", stops, limits.max_stops)
    for text in stops:
        if not text:
            raise InvalidRequest("`stop` must not hold an empty string.", "stop")
        if len(text) > limits.max_stop_chars:
            raise InvalidRequest(
                f"`stop` holds a string of {len(text)} characters; the limit is "
                f"{limits.max_stop_chars}.",
                "stop",
            )
    return TextOptions(
        stops=StopStrings(stops),
        include_stop_in_output=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        min_tokens=request.min_tokens or 0,
        want_tokens=want_tokens,
    )


def num_logprobs(name: str, value: int | None, model: ReadyModel, limits: RequestLimits) -> int:
    """Return how many alternatives to report, NO_LOGPROBS for none; -1 asks for all tokens."""
    if value is None:
        return NO_LOGPROBS
    count = model.worker.vocab_size if value == -1 else value
    if count > limits.max_logprobs:
        raise InvalidRequest(
            f"`{name}` asks for {count} alternatives; the limit is {limits.max_logprobs}.", name
        )
    return count


def resolve_sampling(
    request: SamplingFields,
    model: ReadyModel,
    limits: RequestLimits,
    *,
    max_tokens: int,
    logprobs: int,
    prompt_logprobs: int,
) -> SamplingParams:
    """Return the request's sampling with every default filled in.

    Raises InvalidRequest naming the field and the limit that it breaks.
    """
    defaults = model.text.config.generation
    top_k = _first(request.top_k, defaults.top_k, 0)
    return SamplingParams(
        max_tokens=max_tokens,
        seed=secrets.randbits(63) if request.seed is None else request.seed & _SEED_MASK,
        n=request.n or 1,
        temperature=_first(request.temperature, defaults.temperature, 1.0),
        top_k=max(0, top_k),
        top_p=_first(request.top_p, defaults.top_p, 1.0),
        min_p=_first(request.min_p, defaults.min_p, 0.0),
        repetition_penalty=_first(request.repetition_penalty, defaults.repetition_penalty, 1.0),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=_logit_bias(request, model, limits),
        allowed_token_ids=_allowed_token_ids(request, model),
        bad_words=_bad_words(request, model, limits),
        min_tokens=request.min_tokens or 0,
        eos_token_ids=model.text.config.eos_token_ids,
        stop_token_ids=_stop_token_ids(request, model, limits),
        ignore_eos=bool(request.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Refuse ids that the model does not have."""
    if not token_ids:
        return
    for worst in (max(token_ids), min(token_ids)):
        if not 0 <= worst < vocab_size:
            raise InvalidRequest(
                f"`{name}` holds token id {worst}; the vocabulary ends at {vocab_size - 1}.", name
            )


def _logit_bias(
    request: SamplingFields, model: ReadyModel, limits: RequestLimits
) -> tuple[tuple[int, float], ...]:
    bias = request.logit_bias or {}
    _check_count("logit_bias", bias, limits.max_logit_bias)
    pairs: dict[int, float] = {}
    for key, value in bias.items():
        # int() also takes "1_0", " 1" and digits of other scripts.
        if not (key.isascii() and key.isdigit() and len(key) <= len(str(2**32))):
            raise InvalidRequest(
                f"`logit_bias` has the key {key[:80]!r}; keys are token ids.", "logit_bias"
            )
        pairs[int(key)] = value
    check_token_ids("logit_bias", list(pairs), model.worker.vocab_size)
    return tuple(pairs.items())


def _allowed_token_ids(request: SamplingFields, model: ReadyModel) -> tuple[int, ...]:
    allowed = request.allowed_token_ids
    if allowed is None:
        return ()
    if not allowed:
        raise InvalidRequest("`allowed_token_ids` must not be empty.", "allowed_token_ids")
    check_token_ids("allowed_token_ids", allowed, model.worker.vocab_size)
    return tuple(sorted(set(allowed)))


def _stop_token_ids(
    request: SamplingFields, model: ReadyModel, limits: RequestLimits
) -> tuple[int, ...]:
    stop_token_ids = request.stop_token_ids or []
    _check_count("stop_token_ids", stop_token_ids, limits.max_stop_token_ids)
    check_token_ids("stop_token_ids", stop_token_ids, model.worker.vocab_size)
    return tuple(dict.fromkeys(stop_token_ids))


def _bad_words(
    request: SamplingFields, model: ReadyModel, limits: RequestLimits
) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences that write a bad word, at the start of a word and inside one."""
    words = request.bad_words or []
    _check_count("bad_words", words, limits.max_bad_words)
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.strip()
        if not bare or len(word) > limits.max_bad_word_chars:
            raise InvalidRequest(
                "`bad_words` must hold words of 1 to "
                f"{limits.max_bad_word_chars} characters, got one of {len(bare)}.",
                "bad_words",
            )
        for spelling in (bare, " " + bare):
            sequences[tuple(model.text.tokenizer.encode(spelling, False))] = None
    return tuple(sequence for sequence in sequences if sequence)


def _check_count(name: str, values: Sequence[object] | dict[str, float], limit: int) -> None:
    if len(values) > limit:
        raise InvalidRequest(f"`{name}` has {len(values)} entries; the limit is {limit}.", name)


def _first(given: N | None, of_model: N | None, otherwise: N) -> N:
    if given is not None:
        return given
    return otherwise if of_model is None else of_model
