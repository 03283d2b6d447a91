"""What a server tells of itself: models, health, version, metrics and its own description."""

from __future__ import annotations

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
from twinfire.gateway.gateway import Gateway
from twinfire.gateway.metrics import CONTENT_TYPE


class Service:
    """The handlers, one method each."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._openapi = openapi_document()

    async def models(self, exchange: Exchange) -> None:
        """`GET /v1/models`."""
        cards = [self._card(name) for name in self._gateway.model.names]
        await exchange.answer(msgspec.json.encode(ModelList(cards)))

    async def model(self, exchange: Exchange) -> None:
        """`GET /v1/models/{model}`."""
        name = exchange.path_params["model"]
        if name not in self._gateway.model.names:
            raise unknown_model(name)
        await exchange.answer(msgspec.json.encode(self._card(name)))

    async def health(self, exchange: Exchange) -> None:
        """`GET /health`: 200, or 503 with the reason."""
        reason = self._gateway.unready_reason
        if reason is not None:
            raise not_ready(reason)
        await exchange.answer(msgspec.json.encode(HealthResponse()))

    async def version(self, exchange: Exchange) -> None:
        """`GET /version`."""
        await exchange.answer(msgspec.json.encode(VersionResponse(__version__)))

    async def metrics(self, exchange: Exchange) -> None:
        """`GET /metrics`."""
        gateway = self._gateway
        text = gateway.metrics.render(
            gateway.backend.worker_info, gateway.settings.vllm_metric_names
        )
        await exchange.answer(text, content_type=CONTENT_TYPE)

    async def openapi(self, exchange: Exchange) -> None:
        """`GET /openapi.json`."""
        await exchange.answer(self._openapi)

    def _card(self, name: str) -> ModelCard:
        worker = self._gateway.backend.worker_info
        model = self._gateway.model
        return ModelCard(
            id=name,
            created=model.created_s,
            root=model.names[0] if worker is None else worker.model,
            max_model_len=None if worker is None else worker.max_model_len,
        )
