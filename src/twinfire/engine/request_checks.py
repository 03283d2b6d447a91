"""What a request must be before an engine queues it. Every fault is InvalidRequest."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence

from twinfire.engine.request import Request
from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.messages import ChoiceDelta, Submit
from twinfire.protocol.tokens import unpack_ids


def check_request(
    message: Submit, prompt: array[int], outputs: Sequence[array[int]], vocab_size: int
) -> None:
    """Raise InvalidRequest, naming field and limit, unless the request makes sense."""
    if not prompt:
        raise InvalidRequest("the prompt has no tokens", param="prompt")
    _check_choices(message, outputs)
    sampling = message.sampling
    named_ids = {
        "prompt": (max(prompt),),
        "outputs": tuple(max(output, default=0) for output in outputs),
        "logit_bias": tuple(token_id for token_id, _ in sampling.logit_bias),
        "allowed_token_ids": sampling.allowed_token_ids,
        "stop_token_ids": sampling.stop_token_ids,
        "bad_words": tuple(token_id for word in sampling.bad_words for token_id in word),
    }
    for param, ids in named_ids.items():
        outside = [token_id for token_id in ids if not 0 <= token_id < vocab_size]
        if outside:
            raise InvalidRequest(
                f"{param}: token id {outside[0]} is not in the vocabulary of {vocab_size}",
                param=param,
            )


def check_task(message: Submit, *, embeds: bool) -> None:
    """Raise InvalidRequest unless the request asks for what the model does."""
    sampling = message.sampling
    if embeds and sampling.pooling is None:
        raise InvalidRequest("this model embeds texts; it generates none", "model")
    if not embeds and sampling.pooling is not None:
        raise InvalidRequest("this model generates text; it embeds none", "model")
    if embeds and (sampling.max_tokens or sampling.prompt_logprobs >= 0 or sampling.n != 1):
        raise InvalidRequest("an embedding model has no output but one embedding", "max_tokens")


def check_first_tokens(
    first: Sequence[ChoiceDelta], choices: Collection[int], vocab_size: int
) -> None:
    """Raise InvalidRequest unless choices, each once, could go on from what another worker drew."""
    named = [delta.choice for delta in first]
    if len(set(named)) < len(named) or not set(named) <= set(choices):
        raise InvalidRequest(
            f"first tokens of choices {named} came, {list(choices)} were asked for"
        )
    for delta in first:
        tokens = unpack_ids(delta.tokens)
        if not tokens and delta.finish_reason is None:
            raise InvalidRequest(f"choice {delta.choice} goes on without a first token")
        if max(tokens, default=0) >= vocab_size:
            raise InvalidRequest(f"first token {max(tokens)} is not in the vocabulary")


def check_first_tokens_match(request: Request, first: Sequence[ChoiceDelta]) -> None:
    """Advance the grammars of choices that go on by what another worker drew for them.

    InvalidRequest when a token breaks its grammar.
    """
    for delta in first:
        grammar = request.choice(delta.choice).grammar
        if grammar is None or delta.finish_reason is not None:
            continue
        for token_id in unpack_ids(delta.tokens):
            if not grammar.accept(token_id):
                raise InvalidRequest(f"first token {token_id} does not match the grammar")


def _check_choices(message: Submit, outputs: Sequence[array[int]]) -> None:
    n, choices = message.sampling.n, message.choices
    if len(set(choices)) != len(choices) or not all(0 <= index < n for index in choices):
        raise InvalidRequest(
            f"choices: {choices} are not distinct numbers below n ({n})", "choices"
        )
    if not outputs:
        return
    if len(outputs) != len(choices):
        raise InvalidRequest(
            f"outputs: {len(outputs)} given for {len(choices)} choices", param="outputs"
        )
    longest, limit = max(map(len, outputs)), message.sampling.max_tokens
    if longest >= limit:
        raise InvalidRequest(
            f"outputs: {longest} tokens are output already, the limit is {limit} (max_tokens)",
            param="outputs",
        )
    if message.hand_off is not None and len(choices) > 1 and longest > 0:
        raise InvalidRequest("choices with outputs are handed over one by one", param="choices")
