"""What a server tells of itself: models, health, version, metrics and its own description."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from twinfire import __version__
from twinfire.gateway.dialects.openapi import openapi_document
from twinfire.gateway.dialects.responses import (
    HealthResponse,
    ModelCard,
    ModelList,
    VersionResponse,
)
from twinfire.gateway.errors import not_ready, unknown_model
from twinfire.gateway.exchange import Exchange
from twinfire.gateway.exposition import merged_exposition
from twinfire.gateway.gateway import Gateway
from twinfire.gateway.hosted_model import HostedModel
from twinfire.gateway.metrics import CONTENT_TYPE

if TYPE_CHECKING:
    from twinfire.gateway.external.external_pool import ExternalPool


class Service:
    """The handlers, one method each."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._openapi = openapi_document()

    async def models(self, exchange: Exchange) -> None:
        """`GET /v1/models`: those that the account may use."""
        gateway = self._gateway
        cards = [_card(name, one) for name, one in gateway.models.by_name.items()]
        cards += [_external_card(name, one) for name, one in gateway.external.by_name.items()]
        usable = [card for card in cards if gateway.accounting.may_use(exchange, card.id)]
        await exchange.answer(msgspec.json.encode(ModelList(usable)))

    async def model(self, exchange: Exchange) -> None:
        """`GET /v1/models/{model}`."""
        name = exchange.path_params["model"]
        hosted = self._gateway.models.by_name.get(name)
        external = self._gateway.external.by_name.get(name)
        if hosted is not None:
            card = _card(name, hosted)
        elif external is not None:
            card = _external_card(name, external)
        else:
            raise unknown_model(name)
        self._gateway.accounting.check_model(exchange, name)
        await exchange.answer(msgspec.json.encode(card))

    async def health(self, exchange: Exchange) -> None:
        """`GET /health`: 200, or 503 with the reason."""
        reason = self._gateway.unready_reason
        if reason is not None:
            raise not_ready(reason)
        models = dict.fromkeys(self._gateway.model_names, "ready")
        await exchange.answer(msgspec.json.encode(HealthResponse(models=models)))

    async def version(self, exchange: Exchange) -> None:
        """`GET /version`."""
        await exchange.answer(msgspec.json.encode(VersionResponse(__version__)))

    async def metrics(self, exchange: Exchange) -> None:
        """`GET /metrics`."""
        gateway = self._gateway
        texts = [
            one.metrics.render(one.backend.worker_info, gateway.settings.vllm_metric_names)
            for one in gateway.models
        ]
        texts += [pool.metrics.render() for pool in gateway.external.pools]
        await exchange.answer(merged_exposition(texts), content_type=CONTENT_TYPE)

    async def openapi(self, exchange: Exchange) -> None:
        """`GET /openapi.json`."""
        await exchange.answer(self._openapi)


def _external_card(name: str, pool: ExternalPool) -> ModelCard:
    return ModelCard(id=name, created=pool.created_s, root=pool.engine_model, max_model_len=None)


def _card(name: str, hosted: HostedModel) -> ModelCard:
    worker = hosted.backend.worker_info
    return ModelCard(
        id=name,
        created=hosted.model.created_s,
        root=hosted.model.names[0] if worker is None else worker.model,
        max_model_len=None if worker is None else worker.max_model_len,
    )
