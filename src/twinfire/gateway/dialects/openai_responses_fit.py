"""A request of `/v1/responses` as a chat job, shortened where it asks for that."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from twinfire.gateway.dialects.chat_job import ChatJob, prepare_chat
from twinfire.gateway.dialects.openai_responses_chat import chat_request, in_words_of_responses
from twinfire.gateway.dialects.openai_responses_input import conversation_of
from twinfire.gateway.dialects.openai_responses_requests import InputItem, ResponsesRequest
from twinfire.gateway.dialects.prompts import TOO_LONG
from twinfire.gateway.dialects.requests import Message
from twinfire.gateway.exchange import Exchange
from twinfire.gateway.gateway import Gateway
from twinfire.protocol.errors import InvalidRequest

_RULES = ("system", "developer")


async def prepare_response(
    gateway: Gateway,
    exchange: Exchange,
    request: ResponsesRequest,
    items: Sequence[InputItem],
    session: str,
) -> ChatJob:
    """Return the job. `truncation: auto` leaves out as few of the oldest turns as it can.

    Requests of one `session` go to the engine that has its prompt, unless they name another.
    """
    messages = conversation_of(request.instructions, items)

    async def prepare(kept: list[Message]) -> ChatJob:
        chat = chat_request(request, kept)
        chat.prompt_cache_key = request.prompt_cache_key or session
        return await prepare_chat(gateway, exchange, chat)

    try:
        return await _shortest_cut(prepare, messages, may_cut=request.truncation == "auto")
    except InvalidRequest as error:
        raise in_words_of_responses(error) from None


async def _shortest_cut(
    prepare: Callable[[list[Message]], Awaitable[ChatJob]],
    messages: list[Message],
    *,
    may_cut: bool,
) -> ChatJob:
    try:
        return await prepare(messages)
    except InvalidRequest as error:
        if not may_cut or error.code != TOO_LONG:
            raise
        too_long = error
    cuts = _cuts(messages)
    best: ChatJob | None = None
    low, high = 0, len(cuts)
    while low < high:
        middle = (low + high) // 2
        try:
            best = await prepare(cuts[middle])
            high = middle
        except InvalidRequest as error:
            if error.code != TOO_LONG:
                raise
            low = middle + 1
    if best is None:
        raise too_long
    return best


def _cuts(messages: Sequence[Message]) -> list[list[Message]]:
    """Return the conversation without its first turn, without its first two and so on.

    A turn begins with the user; instructions always stay, and so does the last turn.
    """
    starts = [index for index, message in enumerate(messages) if message.role == "user"]
    return [
        [*(one for one in messages[:start] if one.role in _RULES), *messages[start:]]
        for start in starts[1:]
    ]
