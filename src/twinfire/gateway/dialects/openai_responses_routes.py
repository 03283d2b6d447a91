"""Every path of the Responses dialect with its handler."""

from __future__ import annotations

from twinfire.gateway.dialects.openai_responses import CreateResponse
from twinfire.gateway.dialects.openai_responses_background import BackgroundRuns
from twinfire.gateway.dialects.openai_responses_stored import StoredResponses
from twinfire.gateway.endpoint import Handler
from twinfire.gateway.gateway import Gateway
from twinfire.gateway.response_store.stored_response import ResponseStore

PATH = "/v1/responses"


def responses_handlers(gateway: Gateway, store: ResponseStore) -> list[tuple[str, str, Handler]]:
    """Return (path, method, handler), in the order in which paths are to be matched."""
    runs = BackgroundRuns(gateway, store)
    create = CreateResponse(gateway, store, runs)
    stored = StoredResponses(store, runs)
    one = PATH + "/{response_id}"
    return [
        (PATH, "POST", create),
        (PATH + "/input_tokens", "POST", create.count_tokens),
        (PATH + "/compact", "POST", stored.compact),
        (one, "GET", stored.retrieve),
        (one, "DELETE", stored.delete),
        (one + "/cancel", "POST", stored.cancel),
        (one + "/input_items", "GET", stored.input_items),
    ]
