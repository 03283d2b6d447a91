from __future__ import annotations

import json

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from support.gateway_server import RunningGateway
from support.raw_http import request
from twinfire.gateway.dialects.openapi import openapi_document

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
SCHEMA = schemathesis.openapi.from_dict(json.loads(openapi_document()))
OPERATIONS = [result.ok() for result in SCHEMA.get_all_operations()]
NO_SHRINK = (Phase.explicit, Phase.generate)


def test_document_is_served_and_names_every_route(gateway: RunningGateway) -> None:
    answer = request(gateway.server.address, "GET", "/openapi.json")
    assert answer.body == openapi_document()
    paths = answer.json()["paths"]
    assert isinstance(paths, dict)
    assert set(paths) >= {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health"}


def drive(gateway: RunningGateway, index: int, max_examples: int) -> None:
    operation = OPERATIONS[index]
    cases = st.one_of(
        operation.as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE),
        operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE),
    )

    @settings(
        max_examples=max_examples,
        deadline=None,
        phases=NO_SHRINK,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(cases)
    def conforms(case: schemathesis.Case) -> None:
        response = case.call(base_url=gateway.url)
        case.validate_response(response, checks=CHECKS)

    conforms()
    assert request(gateway.server.address, "GET", "/health").status == 200


@pytest.mark.parametrize("index", range(len(OPERATIONS)), ids=[op.label for op in OPERATIONS])
def test_operation_conforms(gateway: RunningGateway, index: int) -> None:
    drive(gateway, index, 25 if OPERATIONS[index].method == "post" else 5)


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(OPERATIONS)), ids=[op.label for op in OPERATIONS])
def test_operation_conforms_at_length(gateway: RunningGateway, index: int) -> None:
    drive(gateway, index, 1000 if OPERATIONS[index].method == "post" else 50)
