"""The OpenAPI description of the server, made from the structs that requests are decoded into."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from twinfire import __version__
from twinfire.gateway.cluster_control import ClusterStatus
from twinfire.gateway.dialects.anthropic_requests import CountTokensRequest, MessagesRequest
from twinfire.gateway.dialects.anthropic_shapes import (
    AnthropicErrorBody,
    MessageAnswer,
    TokenCount,
)
from twinfire.gateway.dialects.cluster_admin import DrainRequest, RoleRequest, ScaleRequest
from twinfire.gateway.dialects.embeddings_requests import EmbeddingsRequest, EmbeddingsResponse
from twinfire.gateway.dialects.openai_responses_items import (
    DeletedResponse,
    InputTokens,
    ItemList,
    ResponseObject,
)
from twinfire.gateway.dialects.openai_responses_requests import ResponsesRequest
from twinfire.gateway.dialects.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from twinfire.gateway.dialects.responses import (
    ChatResponse,
    CompletionResponse,
    DetokenizeResponse,
    HealthResponse,
    ModelCard,
    ModelList,
    TokenizeResponse,
    VersionResponse,
)
from twinfire.gateway.dialects.usage_api import USAGE_PARAMETERS, UsageAnswer
from twinfire.gateway.dialects.workers_ai_errors import WorkersAiFailure
from twinfire.gateway.dialects.workers_ai_models import CatalogueAnswer
from twinfire.gateway.dialects.workers_ai_requests import RunEnvelope, RunRequest
from twinfire.gateway.dialects.workers_ai_results import RunAnswer
from twinfire.gateway.dialects.workers_ai_shapes import SHARED_PATHS
from twinfire.gateway.errors import ErrorBody

_REF_TEMPLATE = "#/components/schemas/{name}"
_ERRORS = {
    "400": "The request is wrong; the body says which field.",
    "401": "The API key is missing or wrong.",
    "403": "The account may not do this.",
    "404": "No such model, or nothing is here for this client.",
    "405": "The model cannot do this.",
    "408": "The request's time was over before its answer began.",
    "413": "The body is too long.",
    "415": "The body is not JSON.",
    "429": "Too many requests are queued.",
    "500": "The server failed.",
    "503": "The server is not ready; the body says why.",
    "504": "The request's time was over before its answer began.",
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    summary: str
    response: type[msgspec.Struct] | None
    """None for plain text."""
    request: type[msgspec.Struct] | None = None
    streams: bool = False
    guarded: bool = False
    errors: tuple[str, ...] = ()
    fault: type[msgspec.Struct] = ErrorBody
    query: Mapping[str, str] = field(default_factory=dict)
    """Optional parameters of the URL, each with what it is."""


_STORED_ERRORS = ("400", "401", "404", "413", "415", "500", "503")
_POST_ERRORS = ("400", "401", "404", "413", "415", "429", "500", "503", "504")

OPERATIONS = (
    Operation(
        "post",
        "/v1/chat/completions",
        "Answer a conversation",
        ChatResponse,
        ChatRequest,
        streams=True,
        guarded=True,
        errors=_POST_ERRORS,
    ),
    Operation(
        "post",
        "/v1/completions",
        "Continue texts",
        CompletionResponse,
        CompletionRequest,
        streams=True,
        guarded=True,
        errors=_POST_ERRORS,
    ),
    Operation(
        "post",
        "/v1/responses",
        "Answer items, as a response that can be gone on from",
        ResponseObject,
        ResponsesRequest,
        streams=True,
        guarded=True,
        errors=_POST_ERRORS,
    ),
    Operation(
        "post",
        "/v1/responses/input_tokens",
        "Count the prompt's tokens of a response",
        InputTokens,
        ResponsesRequest,
        guarded=True,
        errors=_POST_ERRORS,
    ),
    *(
        Operation(
            method,
            f"/v1/responses/{{response_id}}{path}",
            summary,
            response,
            streams=method == "get" and not path,
            guarded=True,
            errors=_STORED_ERRORS,
        )
        for method, path, summary, response in (
            ("get", "", "Read a stored response, or stream it", ResponseObject),
            ("delete", "", "Forget a response", DeletedResponse),
            ("post", "/cancel", "Call off a background response", ResponseObject),
            ("get", "/input_items", "List what a response was asked with", ItemList),
        )
    ),
    Operation(
        "post",
        "/v1/embeddings",
        "Embed texts",
        EmbeddingsResponse,
        EmbeddingsRequest,
        guarded=True,
        errors=_POST_ERRORS,
    ),
    Operation(
        "post",
        "/v1/messages",
        "Answer a conversation as Anthropic does",
        MessageAnswer,
        MessagesRequest,
        streams=True,
        guarded=True,
        errors=_POST_ERRORS,
        fault=AnthropicErrorBody,
    ),
    Operation(
        "post",
        "/v1/messages/count_tokens",
        "Count the prompt's tokens of a message",
        TokenCount,
        CountTokensRequest,
        guarded=True,
        errors=_POST_ERRORS,
        fault=AnthropicErrorBody,
    ),
    Operation(
        "post",
        "/tokenize",
        "Text to token ids",
        TokenizeResponse,
        TokenizeRequest,
        guarded=True,
        errors=_POST_ERRORS,
    ),
    Operation(
        "post",
        "/detokenize",
        "Token ids to text",
        DetokenizeResponse,
        DetokenizeRequest,
        guarded=True,
        errors=_POST_ERRORS,
    ),
    Operation(
        "get", "/v1/models", "List the models", ModelList, guarded=True, errors=("401", "503")
    ),
    Operation(
        "get",
        "/v1/models/{model}",
        "Describe a model",
        ModelCard,
        guarded=True,
        errors=("401", "404", "503"),
    ),
    Operation("get", "/health", "Whether requests are served", HealthResponse, errors=("503",)),
    Operation("get", "/ping", "Whether requests are served", HealthResponse, errors=("503",)),
    Operation("get", "/version", "The server's version", VersionResponse),
    Operation("get", "/metrics", "Prometheus metrics", None),
    Operation(
        "get",
        "/usage",
        "What was used, by request or summed up",
        UsageAnswer,
        guarded=True,
        errors=("400", "401", "403", "503"),
        query=USAGE_PARAMETERS,
    ),
    Operation(
        "get",
        "/cluster/status",
        "Describe the workers (on this host, of `twinfire up`)",
        ClusterStatus,
        guarded=True,
        errors=("401", "404", "503"),
    ),
    *(
        Operation(
            "post",
            path,
            f"{summary} (on this host, of `twinfire up`)",
            ClusterStatus,
            request,
            guarded=True,
            errors=_POST_ERRORS,
        )
        for path, summary, request in (
            ("/cluster/scale", "Start or drain workers", ScaleRequest),
            ("/cluster/role", "Give a worker another role", RoleRequest),
            ("/cluster/drain", "Let a worker end", DrainRequest),
        )
    ),
)

_RUN_ERRORS = ("400", "401", "403", "404", "405", "408", "413", "415", "429", "500", "503")
_RUN_PREFIXES = ("/client/v4/accounts/{account_id}", "")
WORKERS_AI_OPERATIONS = (
    *(
        Operation(
            "post",
            prefix + path,
            summary,
            RunAnswer,
            request,
            streams=True,
            guarded=True,
            errors=_RUN_ERRORS,
            fault=WorkersAiFailure,
        )
        for prefix in _RUN_PREFIXES
        for path, summary, request in (
            ("/ai/run/{model}", "Run a model; a batch with `?queueRequest=true`", RunRequest),
            ("/ai/run", "Run the model that the body names", RunEnvelope),
        )
    ),
    *(
        Operation(
            "get",
            prefix + "/ai/models/search",
            "Search the models (`search`, `author`, `task`, `source`, `page`, `per_page`)",
            CatalogueAnswer,
            guarded=True,
            errors=("400", "401", "503"),
            fault=WorkersAiFailure,
        )
        for prefix in _RUN_PREFIXES
    ),
    *(
        dataclasses.replace(operation, path=f"{prefix}/ai{operation.path}")
        for prefix in _RUN_PREFIXES
        for operation in OPERATIONS
        if operation.path.startswith(SHARED_PATHS)
    ),
)


def openapi_document() -> bytes:
    """Return the document as JSON."""
    structs = {
        struct
        for operation in (*OPERATIONS, *WORKERS_AI_OPERATIONS)
        for struct in (operation.request, operation.response, operation.fault)
        if struct is not None
    }
    ordered = sorted(structs, key=lambda struct: struct.__name__)
    _, components = msgspec.json.schema_components(ordered, ref_template=_REF_TEMPLATE)
    paths: dict[str, dict[str, object]] = {}
    for operation in (*OPERATIONS, *WORKERS_AI_OPERATIONS):
        paths.setdefault(operation.path, {})[operation.method] = _describe(operation)
    document = {
        "openapi": "3.1.0",
        "info": {"title": "Twinfire", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
    return msgspec.json.encode(document)


def _describe(operation: Operation) -> dict[str, object]:
    described: dict[str, object] = {
        "summary": operation.summary,
        "responses": _responses(operation),
    }
    if operation.request is not None:
        described["requestBody"] = {"required": True, "content": _json(operation.request)}
    names = re.findall(r"{(\w+)}", operation.path)
    parameters: list[dict[str, object]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in names
    ]
    parameters += [
        {"name": name, "in": "query", "description": text, "schema": {"type": "string"}}
        for name, text in operation.query.items()
    ]
    if parameters:
        described["parameters"] = parameters
    if operation.guarded:
        # The empty alternative: a server without keys asks for none.
        described["security"] = [{"key": []}, {}]
    return described


def _responses(operation: Operation) -> dict[str, object]:
    if operation.response is None:
        content: dict[str, object] = {"text/plain": {"schema": {"type": "string"}}}
    else:
        content = _json(operation.response)
    if operation.streams:
        # No schema: readers of the document differ in whether one is of the text or of each event.
        content["text/event-stream"] = {}
    responses: dict[str, object] = {"200": {"description": "Done.", "content": content}}
    for status in operation.errors:
        responses[status] = {"description": _ERRORS[status], "content": _json(operation.fault)}
    return responses


def _json(struct: type[msgspec.Struct]) -> dict[str, object]:
    reference = _REF_TEMPLATE.format(name=struct.__name__)
    return {"application/json": {"schema": {"$ref": reference}}}
