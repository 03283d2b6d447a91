from __future__ import annotations

import re

import pytest

from twinfire.gateway.routing.session import MAX_SESSION_CHARS, mint_session, read_session
from twinfire.protocol.errors import InvalidRequest


def test_names_are_read_in_the_documented_order() -> None:
    headers = {"x-session-affinity": " first ", "x-session-id": "second"}
    assert read_session(headers, "third") == "first"
    del headers["x-session-affinity"]
    assert read_session(headers, "third") == "second"
    assert read_session({}, "third") == "third"


def test_a_request_id_is_no_session() -> None:
    assert read_session({"x-request-id": "r1", "x-correlation-id": "c1"}) is None
    assert read_session({"x-session-affinity": "  "}, "") is None


@pytest.mark.parametrize("name", ["x" * (MAX_SESSION_CHARS + 1), "a\x00b", "a\nb"])
def test_names_that_nobody_can_print_or_store_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_session({"x-session-id": name})
    assert caught.value.param == "x-session-id"
    with pytest.raises(InvalidRequest, match="prompt_cache_key"):
        read_session({}, name)


def test_minted_names_are_fit_for_headers_and_never_the_same() -> None:
    names = {mint_session() for _ in range(200)}
    assert len(names) == 200
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{20,64}", name) for name in names)
    assert all(read_session({"x-session-affinity": name}) == name for name in names)
