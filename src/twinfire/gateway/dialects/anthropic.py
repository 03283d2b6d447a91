"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

import msgspec

from twinfire.gateway.dialects.anthropic_chat import CHAT_NAMES, CHAT_PARTS, chat_request
from twinfire.gateway.dialects.anthropic_requests import CountTokensRequest, MessagesRequest
from twinfire.gateway.dialects.anthropic_shapes import TokenCount
from twinfire.gateway.dialects.anthropic_stream import MessageWriter, whole_message
from twinfire.gateway.dialects.chat_answer import collect_chat, stream_chat
from twinfire.gateway.dialects.chat_job import ChatJob, prepare_chat
from twinfire.gateway.dialects.json_body import decode_body
from twinfire.gateway.dialects.prompts import TOO_LONG
from twinfire.gateway.dialects.renamed_fields import renamed
from twinfire.gateway.exchange import Exchange
from twinfire.gateway.gateway import Gateway
from twinfire.protocol.errors import InvalidRequest


class Messages:
    """The handlers."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._decoder = msgspec.json.Decoder(MessagesRequest)
        self._count_decoder = msgspec.json.Decoder(CountTokensRequest)

    async def __call__(self, exchange: Exchange) -> None:
        """Answer one request."""
        request = decode_body(exchange.body, self._decoder)
        job = await self._prepare(exchange, request)
        if request.stream:
            await stream_chat(exchange, job, MessageWriter(job), done_event=False)
        else:
            answer = await collect_chat(exchange, job)
            await exchange.answer(msgspec.json.encode(whole_message(job, answer)))

    async def count_tokens(self, exchange: Exchange) -> None:
        """Answer how long the prompt of a request is."""
        request = decode_body(exchange.body, self._count_decoder)
        job = await self._prepare(exchange, request)
        await exchange.answer(msgspec.json.encode(TokenCount(len(job.prompt))))

    async def _prepare(self, exchange: Exchange, request: CountTokensRequest) -> ChatJob:
        chat = chat_request(request)
        try:
            try:
                return await prepare_chat(self._gateway, exchange, chat, id_prefix="msg_")
            except InvalidRequest as error:
                if error.code != TOO_LONG or error.param != "max_completion_tokens":
                    raise
            # Clients of this dialect must name a bound and name a large one: the window is one.
            chat.max_completion_tokens = None
            return await prepare_chat(self._gateway, exchange, chat, id_prefix="msg_")
        except InvalidRequest as error:
            raise renamed(error, CHAT_NAMES, CHAT_PARTS) from None
