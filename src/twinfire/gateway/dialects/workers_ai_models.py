"""`GET /ai/models/search`: the models served here, in the shape of the public catalogue."""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Iterator

import msgspec

from twinfire.accounts.prices import PriceTable
from twinfire.gateway.dialects.json_body import JsonValue
from twinfire.gateway.exchange import Exchange
from twinfire.gateway.gateway import Gateway
from twinfire.gateway.hosted_model import HostedModel
from twinfire.protocol.errors import InvalidRequest

MAX_PER_PAGE = 100
DEFAULT_PER_PAGE = 50
_MAX_PAGE = 1_000_000
_OWN_SOURCE = 1
"""All models here are the operator's own, which the catalogue numbers 1."""


class CatalogueTask(msgspec.Struct):
    """What a model is for."""

    id: str
    name: str
    description: str


class CatalogueProperty(msgspec.Struct):
    """One thing to know of a model; `value` is a text, but for prices."""

    property_id: str
    value: JsonValue


class CatalogueModel(msgspec.Struct):
    """One model."""

    id: str
    name: str
    description: str
    task: CatalogueTask
    created_at: str
    """UTC, ISO 8601."""
    properties: list[CatalogueProperty]
    source: int = _OWN_SOURCE
    tags: list[str] = []


class PageInfo(msgspec.Struct):
    """Which part of the list this is. `total_count` is of all that match."""

    count: int
    page: int
    per_page: int
    total_count: int


class CatalogueAnswer(msgspec.Struct):
    """Answer of `/ai/models/search`."""

    result: list[CatalogueModel]
    result_info: PageInfo
    success: bool = True
    errors: list[str] = []
    messages: list[str] = []


TEXT_GENERATION = CatalogueTask(
    id="c329a1f9-323d-4e91-b2aa-582dd4188d34",
    name="Text Generation",
    description="Family of generative text models, such as large language models (LLM).",
)


class ModelSearch:
    """The handler."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, exchange: Exchange) -> None:
        """Answer one search."""
        query = exchange.query
        page = _number(exchange, "page", 1, _MAX_PAGE)
        per_page = _number(exchange, "per_page", DEFAULT_PER_PAGE, MAX_PER_PAGE)
        wanted = query.get("search", "").lower()
        author = query.get("author", "").lower()
        task = query.get("task", "").lower()
        source = query.get("source", "")
        found = [
            model
            for model in self._models(exchange)
            if wanted in model.name.lower()
            and (not author or _author(model.name).lower() == author)
            and (not task or model.task.name.lower() == task)
            and source in ("", str(_OWN_SOURCE))
        ]
        shown = found[(page - 1) * per_page : page * per_page]
        info = PageInfo(len(shown), page, per_page, len(found))
        await exchange.answer(msgspec.json.encode(CatalogueAnswer(shown, info)))

    def _models(self, exchange: Exchange) -> Iterator[CatalogueModel]:
        """Yield those that the account may use."""
        gateway = self._gateway
        for name, hosted in gateway.models.by_name.items():
            if gateway.accounting.may_use(exchange, name):
                yield _described(name, hosted, gateway.settings.prices)


def _described(name: str, hosted: HostedModel, prices: PriceTable) -> CatalogueModel:
    worker = hosted.backend.worker_info
    properties = [
        CatalogueProperty("async_queue", "true"),
        CatalogueProperty("function_calling", "true"),
    ]
    price = prices.catalogue(name, *hosted.model.names)
    if price:
        properties.append(CatalogueProperty("price", price))
    if worker is not None:
        # What is enforced, not what the model could do elsewhere.
        properties.append(CatalogueProperty("context_window", str(worker.max_model_len)))
    served = "" if worker is None else f" ({worker.architecture}, {worker.dtype})"
    created = datetime.datetime.fromtimestamp(hosted.model.created_s, datetime.UTC)
    return CatalogueModel(
        id=str(uuid.uuid5(uuid.NAMESPACE_URL, f"twinfire:{name}")),
        name=name,
        description=f"{hosted.model.names[0]}{served}",
        task=TEXT_GENERATION,
        created_at=created.strftime("%Y-%m-%d %H:%M:%S.000"),
        properties=properties,
    )


def _author(name: str) -> str:
    """Return the part of a name that says whose model it is: `@cf/AUTHOR/MODEL`, `AUTHOR/MODEL`."""
    parts = name.split("/")
    if parts[0].startswith("@"):
        parts = parts[1:]
    return parts[0] if len(parts) > 1 else ""


def _number(exchange: Exchange, name: str, default: int, limit: int) -> int:
    text = exchange.query.get(name)
    if not text:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and 1 <= int(text) <= limit):
        raise InvalidRequest(f"`{name}` must be from 1 to {limit}, got {text[:20]!r}.", name)
    return int(text)
