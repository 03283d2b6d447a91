"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from array import array

import msgspec

from twinfire.gateway.dialects.conversation import (
    check_template_fields,
    conversation_chars,
    conversation_ids,
)
from twinfire.gateway.dialects.json_body import decode_body
from twinfire.gateway.dialects.requests import DetokenizeRequest, TokenizeRequest
from twinfire.gateway.dialects.responses import DetokenizeResponse, TokenizeResponse
from twinfire.gateway.dialects.sampling import check_token_ids
from twinfire.gateway.dialects.tools import declared_tools
from twinfire.gateway.exchange import Exchange
from twinfire.gateway.gateway import Gateway
from twinfire.gateway.hosted_model import ReadyModel
from twinfire.protocol.errors import InvalidRequest


class Tokenize:
    """Text or a conversation to token ids, as the generating endpoints would make them."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._decoder = msgspec.json.Decoder(TokenizeRequest)

    async def __call__(self, exchange: Exchange) -> None:
        """Answer one request."""
        request = decode_body(exchange.body, self._decoder)
        model = self._gateway.ready_model(request.model)
        ids = await self._ids(request, model)
        text_of = model.text.vocabulary.text_of
        answer = TokenizeResponse(
            count=len(ids),
            max_model_len=model.max_model_len,
            tokens=list(ids),
            token_strs=list(map(text_of, ids)) if request.return_token_strs else None,
        )
        await exchange.answer(msgspec.json.encode(answer))

    async def _ids(self, request: TokenizeRequest, model: ReadyModel) -> array[int]:
        if (request.prompt is None) == (request.messages is None):
            raise InvalidRequest("Exactly one of `prompt` and `messages` is needed.", "prompt")
        if request.prompt is not None:
            # No cap on the length here: whoever asks wants to know how long the text is.
            return await self._gateway.handle_text(
                len(request.prompt),
                model.text.tokenizer.encode,
                request.prompt,
                request.add_special_tokens is not False,
            )
        messages = request.messages or []
        check_template_fields(request, messages, self._gateway.settings)
        tools = declared_tools(request.tools)
        return await self._gateway.handle_text(
            conversation_chars(messages, len(tools)),
            conversation_ids,
            request,
            messages,
            model,
            [tool.definition for tool in tools] or None,
            add_special_tokens=bool(request.add_special_tokens),
            may_be_long=True,
        )


class Detokenize:
    """Token ids to text."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._decoder = msgspec.json.Decoder(DetokenizeRequest)

    async def __call__(self, exchange: Exchange) -> None:
        """Answer one request."""
        request = decode_body(exchange.body, self._decoder)
        model = self._gateway.ready_model(request.model)
        check_token_ids("tokens", request.tokens, model.worker.vocab_size)
        text = await self._gateway.handle_text(
            len(request.tokens), model.text.tokenizer.decode, request.tokens, False
        )
        await exchange.answer(msgspec.json.encode(DetokenizeResponse(text)))
