"""What came before a request of `/v1/responses`, read from the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from twinfire.gateway.dialects.openai_responses_input import Located
from twinfire.gateway.dialects.openai_responses_items import RUNNING, response_of_item
from twinfire.gateway.dialects.openai_responses_requests import InputItem
from twinfire.gateway.errors import HttpError
from twinfire.gateway.response_store.stored_response import ResponseStore, StoredResponse
from twinfire.protocol.errors import InvalidRequest


class _StoredOutput(msgspec.Struct):
    output: list[InputItem]


_OUTPUT = msgspec.json.Decoder(_StoredOutput)
_ITEMS = msgspec.json.Decoder(list[InputItem])


@dataclass(frozen=True, slots=True)
class History:
    """The conversation before a request."""

    items: Sequence[InputItem]
    root_id: str | None
    """The response that began it, None for a conversation that begins now."""


NO_HISTORY = History((), None)


async def read_history(store: ResponseStore, account_id: str, previous_id: str | None) -> History:
    """Return what a request that names `previous_id` goes on from; 404 where it is gone."""
    if previous_id is None:
        return NO_HISTORY
    path = await store.conversation(account_id, previous_id)
    lost = previous_id if not path else path[0].previous_id
    if lost is not None:
        raise unknown_response(lost, "previous_response_id")
    status = path[-1].status
    if status in RUNNING or status in ("failed", "cancelled"):
        raise InvalidRequest(
            f"`previous_response_id` names a response that is {status}; only a finished one can "
            "be gone on from.",
            "previous_response_id",
        )
    items = [item for stored in path for item in (*input_items(stored), *_output_items(stored))]
    return History(items, path[0].root_id)


async def without_references(
    store: ResponseStore, account_id: str, given: Sequence[Located]
) -> list[InputItem]:
    """Return the items with every reference replaced by what it names."""
    items: list[InputItem] = []
    for param, item in given:
        if item.type == "item_reference":
            items.append(await _referenced(store, account_id, item.id or "", param))
        else:
            items.append(item)
    return items


def input_items(stored: StoredResponse) -> list[InputItem]:
    """Return the items that a response was asked with."""
    return _ITEMS.decode(stored.input_items)


def unknown_response(response_id: str, param: str) -> HttpError:
    """There is no such response of this account."""
    shown = response_id[:80]
    message = f"There is no response `{shown}` here; it was not stored, or is no longer."
    return HttpError(404, message, param=param, code="response_not_found")


def _output_items(stored: StoredResponse) -> list[InputItem]:
    return _OUTPUT.decode(stored.response).output


async def _referenced(
    store: ResponseStore, account_id: str, id_of_item: str, param: str
) -> InputItem:
    response_id = response_of_item(id_of_item)
    stored = await store.find(account_id, response_id) if response_id else None
    if stored is not None:
        for item in (*_output_items(stored), *input_items(stored)):
            if item.id == id_of_item:
                return item
    raise InvalidRequest(
        f"`{param}` refers to the item `{id_of_item[:80]}`, which is not stored here.", param
    )
