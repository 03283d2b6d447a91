"""The application: every route of the server, over one gateway."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from twinfire.accounts.database import Database
from twinfire.gateway.backends.backend import Backend
from twinfire.gateway.batches.batches import Batches
from twinfire.gateway.cluster_control import ClusterControl
from twinfire.gateway.dashboard.routes import dashboard_routes
from twinfire.gateway.dialects.anthropic import Messages
from twinfire.gateway.dialects.anthropic_shapes import speak_anthropic
from twinfire.gateway.dialects.chat import ChatCompletions
from twinfire.gateway.dialects.cluster_admin import ClusterAdmin
from twinfire.gateway.dialects.completions import Completions
from twinfire.gateway.dialects.embeddings import Embeddings
from twinfire.gateway.dialects.openai_responses_routes import responses_handlers
from twinfire.gateway.dialects.service import Service
from twinfire.gateway.dialects.tokenization import Detokenize, Tokenize
from twinfire.gateway.dialects.usage_api import UsageApi
from twinfire.gateway.dialects.workers_ai_batches import BatchAnswers
from twinfire.gateway.dialects.workers_ai_routes import routing_fault, workers_ai_routes
from twinfire.gateway.endpoint import Endpoint, Handler
from twinfire.gateway.errors import STATUS_TYPES, HttpError, fault_of
from twinfire.gateway.external.external_models import ExternalModels
from twinfire.gateway.gateway import Gateway
from twinfire.gateway.hosted_model import HostedModel, HostedModels
from twinfire.gateway.metrics import Metrics
from twinfire.gateway.response_store.sql_store import SqlResponseStore
from twinfire.gateway.served_model import ServedModel
from twinfire.gateway.settings import GatewaySettings


def create_app(
    settings: GatewaySettings,
    backend: Backend,
    model: ServedModel,
    metrics: Metrics | None = None,
) -> Starlette:
    """Return the ASGI application of one model.

    `metrics` is given when something else feeds it too, such as a worker's load reports.
    """
    return create_app_of_models(settings, [HostedModel.of(model, backend, metrics)])


def create_app_of_models(
    settings: GatewaySettings,
    models: Sequence[HostedModel],
    cluster: ClusterControl | None = None,
    external: ExternalModels | None = None,
) -> Starlette:
    """Return the ASGI application. Call it from the event loop's thread.

    The models' text sides and workers may still be loading: `/health` tells when they are ready.
    With `cluster` its workers can be administered; whoever gives `external` models starts them.
    InvalidRequest when two models share a name, or when an alias takes one or leads nowhere.
    """
    external = external or ExternalModels()
    hosted = HostedModels(models, settings.aliases, external.by_name)
    gateway = Gateway(settings, hosted, external.with_aliases(settings.aliases))
    if settings.otlp_endpoint is not None:
        _trace(gateway, settings.otlp_endpoint)
    routes = _routes(gateway, gateway.database)
    batches = Batches(
        gateway.models, gateway.database, BatchAnswers(gateway), lambda: gateway.num_served
    )
    gateway.add_background(batches.start, batches.stop)
    routes += workers_ai_routes(gateway, batches, routes)
    routes += _cluster_routes(gateway, cluster) if cluster else ()
    routes += dashboard_routes(gateway, cluster)
    app = Starlette(
        routes=routes,
        exception_handlers={HTTPException: _starlette_fault},
    )
    # Redirects of `/v1/models/` lose the body of a POST; a 404 is clearer.
    app.router.redirect_slashes = False
    app.state.gateway = gateway
    return app


def gateway_of(app: Starlette) -> Gateway:
    """Return the gateway behind an application of `create_app`."""
    gateway = app.state.gateway
    assert isinstance(gateway, Gateway)
    return gateway


def _trace(gateway: Gateway, endpoint: str) -> None:
    # An extra, and half a second of imports.
    from twinfire.gateway.traces import RequestTraces

    traces = RequestTraces.to(endpoint)
    gateway.requests.report_to(traces.observe)
    gateway.on_close(traces.close)


def _routes(gateway: Gateway, database: Database) -> list[Route]:
    def route(path: str, method: str, handler: Handler, *, guarded: bool) -> Route:
        return Route(path, Endpoint(gateway, handler, guarded=guarded), methods=[method])

    def generation(path: str, own: Handler) -> Route:
        is_alone = len(gateway.model_names) == 1
        admit = gateway.accounting.admit
        handler = gateway.external.before(path, own, admit, takes_unnamed=is_alone)
        return route(path, "POST", handler, guarded=True)

    def message(path: str, handler: Handler) -> Route:
        endpoint = Endpoint(gateway, handler, guarded=True, speak=speak_anthropic)
        return Route(path, endpoint, methods=["POST"])

    messages = Messages(gateway)
    store = SqlResponseStore(database)
    service = Service(gateway)
    usage = UsageApi(gateway)
    return [
        generation("/v1/chat/completions", ChatCompletions(gateway)),
        generation("/v1/completions", Completions(gateway)),
        *(
            route(path, method, handler, guarded=True)
            for path, method, handler in responses_handlers(gateway, store)
        ),
        route("/v1/embeddings", "POST", Embeddings(gateway), guarded=True),
        message("/v1/messages", messages),
        message("/v1/messages/count_tokens", messages.count_tokens),
        route("/tokenize", "POST", Tokenize(gateway), guarded=True),
        route("/detokenize", "POST", Detokenize(gateway), guarded=True),
        route("/usage", "GET", usage.usage, guarded=True),
        route("/usage.csv", "GET", usage.csv, guarded=True),
        route("/v1/models", "GET", service.models, guarded=True),
        route("/v1/models/{model:path}", "GET", service.model, guarded=True),
        route("/health", "GET", service.health, guarded=False),
        route("/ping", "GET", service.health, guarded=False),
        route("/version", "GET", service.version, guarded=False),
        route("/metrics", "GET", service.metrics, guarded=False),
        route("/openapi.json", "GET", service.openapi, guarded=False),
    ]


def _cluster_routes(gateway: Gateway, cluster: ClusterControl) -> list[Route]:
    key = gateway.settings.admin_key
    admin = ClusterAdmin(cluster, is_remote=key is not None)
    keys = None if key is None else (key,)

    def route(path: str, method: str, handler: Handler) -> Route:
        endpoint = Endpoint(gateway, handler, guarded=True, keys=keys)
        return Route(path, endpoint, methods=[method])

    return [
        route("/cluster/status", "GET", admin.status),
        route("/cluster/scale", "POST", admin.scale),
        route("/cluster/role", "POST", admin.role),
        route("/cluster/drain", "POST", admin.drain),
    ]


async def _starlette_fault(request: Request, error: Exception) -> Response:
    """Give the router's own faults (no such path, wrong method) the body of all others."""
    assert isinstance(error, HTTPException)
    status = error.status_code if error.status_code in STATUS_TYPES else 500
    if status == 405:
        message = f"`{request.url.path}` does not take the method {request.method}."
    else:
        message = f"There is nothing at `{request.url.path}`."
    headers = tuple((error.headers or {}).items())
    fault = fault_of(HttpError(status, message, headers=headers))
    other = routing_fault(request.url.path, fault)
    if other is not None:
        return other
    return Response(fault.encode(), status, dict(fault.headers), media_type="application/json")
