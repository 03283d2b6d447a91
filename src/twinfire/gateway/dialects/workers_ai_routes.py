"""The paths of Workers AI, each with and without the prefix that names an account.

What stands for the account is checked against the token's (`Endpoint`), and means nothing else.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from starlette.responses import Response
from starlette.routing import Route

from twinfire.gateway.batches.batches import Batches
from twinfire.gateway.dialects.workers_ai import WorkersAiRun
from twinfire.gateway.dialects.workers_ai_batches import BatchRequests
from twinfire.gateway.dialects.workers_ai_errors import error_kind, failure_body, speak_workers_ai
from twinfire.gateway.dialects.workers_ai_models import ModelSearch
from twinfire.gateway.dialects.workers_ai_shapes import SHARED_PATHS
from twinfire.gateway.endpoint import Endpoint
from twinfire.gateway.errors import Fault
from twinfire.gateway.gateway import Gateway

_API_PREFIX = "/client/v4"
ACCOUNT_PREFIX = _API_PREFIX + "/accounts/{account_id}"
_PREFIXES = (ACCOUNT_PREFIX, "")


def workers_ai_routes(gateway: Gateway, batches: Batches, others: Sequence[Route]) -> list[Route]:
    """Return all routes; those of `others` that the service has under `/ai` are offered there."""
    run = WorkersAiRun(gateway, BatchRequests(gateway, batches))
    search = ModelSearch(gateway)
    routes = []
    for prefix in _PREFIXES:
        for path, method, handler in (
            ("/ai/run", "POST", run),
            ("/ai/run/{model:path}", "POST", run),
            ("/ai/models/search", "GET", search),
        ):
            endpoint = Endpoint(gateway, handler, guarded=True, speak=speak_workers_ai)
            routes.append(Route(prefix + path, endpoint, methods=[method]))
        routes += [
            Route(f"{prefix}/ai{route.path}", route.endpoint, methods=list(route.methods or ()))
            for route in others
            if route.path.startswith(SHARED_PATHS)
        ]
    return routes


def routing_fault(path: str, fault: Fault) -> Response | None:
    """Return the answer to a request that no route takes, None for paths of other dialects."""
    if not path.startswith((_API_PREFIX + "/", "/ai/")):
        return None
    body = failure_body(fault, uuid.uuid4().hex)
    status = error_kind(fault).http_status
    return Response(body, status, dict(fault.headers), media_type="application/json")
