"""A native request, checked: a chat job."""

from __future__ import annotations

import msgspec

from twinfire.gateway.dialects.chat_job import ChatJob, prepare_chat
from twinfire.gateway.dialects.json_body import decode_body
from twinfire.gateway.dialects.requests import ChatRequest
from twinfire.gateway.dialects.workers_ai_input import Fields, run_input
from twinfire.gateway.exchange import Exchange
from twinfire.gateway.gateway import Gateway

_ID_PREFIX = "chatcmpl-"


async def prepare_run(
    gateway: Gateway,
    exchange: Exchange,
    decoder: msgspec.json.Decoder[ChatRequest],
    fields: Fields,
    model: str,
) -> ChatJob:
    """Return a native request as a job; InvalidRequest or HttpError with what is wrong with it."""
    given = run_input(fields, model)
    request = decode_body(given.chat_body, decoder)
    ready = gateway.ready_model(model)
    # A model without a template takes the text as it is.
    is_raw = given.is_raw or (given.is_prompt and ready.text.template is None)
    return await prepare_chat(
        gateway, exchange, request, id_prefix=_ID_PREFIX, is_templated=not is_raw
    )
