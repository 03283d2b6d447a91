"""Who may call, what limits do, and what is booked: through a real server and its real database."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path

import pytest
from openai import OpenAI, PermissionDeniedError, RateLimitError

from support.gateway_server import ALIAS, MODEL, RunningGateway, running_gateway
from support.raw_http import Answer, open_post, read_until, request
from support.scripted_backend import ScriptedBackend, say
from twinfire.accounts.account_store import AccountStore
from twinfire.accounts.api_token import new_token
from twinfire.accounts.database import Database, DatabaseUnavailable, open_database
from twinfire.accounts.limits import NO_LIMITS, Limits
from twinfire.accounts.prices import ModelPrice, PriceTable
from twinfire.accounts.usage_record import UsageRecord
from twinfire.accounts.usage_store import UsageFilter, UsageStore
from twinfire.gateway.settings import GatewaySettings
from twinfire.protocol.errors import Overloaded

CHAT = "/v1/chat/completions"
BODY: dict[str, object] = {"messages": [{"role": "user", "content": "hi"}]}
PRICES = PriceTable(
    prices={MODEL: ModelPrice(input=Decimal(1000), cached_input=Decimal(100), output=Decimal(3000))}
)


class World:
    """A server and the database that its operator works on from beside it."""

    def __init__(self, gateway: RunningGateway, database: Database) -> None:
        self.gateway = gateway
        self.accounts = AccountStore(database)
        self.usage = UsageStore(database)

    def token(self, name: str, limits: Limits = NO_LIMITS, *, is_admin: bool = False) -> str:
        self.accounts.create(name, limits, is_admin=is_admin)
        return self.accounts.create_token(name)[0]

    def post(
        self,
        token: str | None,
        body: dict[str, object] | None = None,
        path: str = CHAT,
        **more: str,
    ) -> Answer:
        headers = {name.replace("_", "-"): value for name, value in more.items()}
        if token is not None:
            headers["authorization"] = f"Bearer {token}"
        return request(self.gateway.server.address, "POST", CHAT, body or BODY, headers)

    def get(self, token: str, path: str) -> Answer:
        headers = {"authorization": f"Bearer {token}"}
        return request(self.gateway.server.address, "GET", path, None, headers)

    def records(self) -> list[UsageRecord]:
        return [one for _, one in reversed(self.usage.page(UsageFilter(), 1000))]

    def wait_for_records(self, count: int) -> list[UsageRecord]:
        deadline_s = time.monotonic() + 10
        while len(records := self.records()) < count:
            assert time.monotonic() < deadline_s, records
            time.sleep(0.01)
        return records


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., World]]:
    """Start a server with more settings than the database's."""
    url = str(tmp_path / "accounts.db")
    database = open_database(url)
    running = []

    def begin(**settings: object) -> World:
        context = running_gateway(
            GatewaySettings(database=url, prices=PRICES, **settings),
            lambda: ScriptedBackend(script=say("hello"), cached_tokens=2),
        )
        running.append(context)
        return World(context.__enter__(), database)

    yield begin
    for context in running:
        context.__exit__(None, None, None)
    database.close()


@pytest.fixture
def world(start: Callable[..., World]) -> World:
    return start()


def test_open_until_there_is_a_token(world: World) -> None:
    assert world.post(None).status == world.post("whatever").status == 200
    token = world.token("a")
    assert world.post(token).status == 200
    for wrong in (None, "whatever", new_token(), token[:-1], token + "x", ""):
        refused = world.post(wrong)
        assert (refused.status, refused.error()["code"]) == (401, "invalid_api_key")
        assert refused.headers["www-authenticate"] == "Bearer"
    assert world.post(None, x_api_key=token).status == 200
    assert request(world.gateway.server.address, "GET", "/health").status == 200


def test_modes_and_static_keys(start: Callable[..., World]) -> None:
    strict = start(access="tokens")
    assert strict.post(None).status == 401
    keyed = start(api_keys=("static",))
    token = keyed.token("a")
    assert [keyed.post(one).status for one in ("static", token, "other", None)] == [
        *(200, 200),
        *(401, 401),
    ]
    lax = start(access="open")
    assert lax.post(None).status == 200
    assert lax.post(new_token()).status == 401


def test_revocation_and_disabling_are_seen_within_seconds(world: World) -> None:
    token = world.token("a")
    assert world.post(token).status == 200

    def wait_for(status: int) -> float:
        begin_s = time.monotonic()
        while world.post(token).status != status:
            assert time.monotonic() - begin_s < 10
            time.sleep(0.05)
        return time.monotonic() - begin_s

    world.accounts.set_disabled("a", True)
    assert wait_for(403) < 5
    world.accounts.set_disabled("a", False)
    assert wait_for(200) < 5
    world.accounts.revoke_token(world.accounts.tokens("a")[0].id)
    assert wait_for(401) < 5


def test_a_record_says_what_the_client_saw(world: World) -> None:
    token = world.token("a")
    whole = world.post(token, x_request_id="one", twinfire_cost="1")
    usage = whole.json()["usage"]
    streamed = world.post(
        token,
        {**BODY, "model": ALIAS, "stream": True, "stream_options": {"include_usage": True}},
        twinfire_cost="1",
    )
    stream_usage = streamed.events()[-2]["usage"]
    first, second = world.records()
    assert first.request_id == "one"
    assert (first.outcome, first.status, first.finish) == ("finished", 200, "stop")
    assert first.account_id == world.accounts.find("a").id
    assert first.token_id == world.accounts.tokens("a")[0].id
    assert (first.endpoint, first.model, second.model) == (CHAT, MODEL, ALIAS)
    assert first.ttft_s is not None
    assert 0 < first.ttft_s <= first.total_s < 10
    for record, seen in ((first, usage), (second, stream_usage)):
        assert record.num_input_tokens == seen["prompt_tokens"]
        assert record.num_output_tokens == seen["completion_tokens"]
        assert record.num_cached_tokens == seen["prompt_tokens_details"]["cached_tokens"] == 2
        assert record.price_nanos == round(seen["cost"] * 10**9)
    output = first.num_output_tokens
    expected = (first.num_input_tokens - 2) * 1000 + 2 * 100 + output * 3000
    assert first.price_nanos == expected * 1000
    assert "cost" not in world.post(token).json()["usage"]


def test_requests_that_end_otherwise_have_one_record_too(world: World) -> None:
    backend = world.gateway.backend
    stream = {**BODY, "stream": True}
    backend.fails_after = 2
    assert world.post(None).status == 503
    assert world.post(None, stream).status == 200
    backend.fails_after = None
    backend.holds_after = 2
    connection = open_post(world.gateway.server.address, CHAT, stream)
    read_until(connection, b'"content":"e"')
    connection.close()
    world.wait_for_records(3)
    backend.refusal = Overloaded("full")
    backend.holds_after = None
    assert world.post(None).status == 429
    assert world.post(None, {"messages": []}).status == 400
    backend.refusal = None
    assert world.post(None).status == 200
    records = world.wait_for_records(4)
    assert [(one.outcome, one.status, one.finish) for one in records] == [
        ("failed", 503, "ServiceUnavailableError"),
        ("failed", 200, "ServiceUnavailableError"),
        ("cancelled", 200, ""),
        ("finished", 200, "stop"),
    ]
    assert [one.num_output_tokens for one in records[:3]] == [2, 2, 2]


def test_the_record_is_committed_before_the_last_event(world: World) -> None:
    def append(*_: object, **__: object) -> None:
        raise DatabaseUnavailable("gone")

    async def break_the_ledger() -> None:
        from twinfire.gateway.accounting import usage_writer

        store = await gateway_accounting(world).usage()
        store.append = append  # type: ignore[method-assign]
        usage_writer._WAITED_LIMIT_S = 0.2

    from twinfire.gateway.accounting import usage_writer

    limit_s = usage_writer._WAITED_LIMIT_S
    try:
        world.gateway.run(break_the_ledger())
        failed = world.post(None)
        assert (failed.status, failed.error()["code"]) == (503, "accounts_unavailable")
        events = world.post(None, {**BODY, "stream": True}).events()
        assert events[-2]["error"]["code"] == "accounts_unavailable"
        assert all(event["choices"][0]["finish_reason"] != "stop" for event in events[:-2])
    finally:
        usage_writer._WAITED_LIMIT_S = limit_s


def test_who_leaves_while_the_record_is_committed_holds_up_nobody(world: World) -> None:
    """The record of a client that left came twice into one transaction, which failed for all."""
    address, body = world.gateway.server.address, {**BODY, "stream": True}
    last_token = b'"content":"o"'
    stays: list[socket.socket] = []
    with world.usage._database.write():
        for leaves in (False, True, False):
            connection = open_post(address, CHAT, body)
            read_until(connection, last_token)
            # The first is taken alone; what comes while it waits for the lock is one transaction.
            time.sleep(0.1)
            if leaves:
                connection.close()
            else:
                stays.append(connection)
        time.sleep(0.2)
    for stayed in stays:
        assert b"error" not in read_until(stayed, b"[DONE]")
        stayed.close()
    records = world.wait_for_records(3)
    assert [one.outcome for one in records] == ["finished"] * 3
    assert len({one.record_id for one in records}) == 3


def gateway_accounting(world: World):  # type: ignore[no-untyped-def]
    return world.gateway.server._gateway.accounting


def test_rates_refuse_with_honest_headers(world: World) -> None:
    token = world.token("a", Limits(requests_per_minute=2, tokens_per_minute=10_000))
    answers = [world.post(token) for _ in range(3)]
    assert [one.status for one in answers] == [200, 200, 429]
    headers = answers[0].headers
    assert headers["x-ratelimit-limit-requests"] == "2"
    assert headers["x-ratelimit-remaining-requests"] == "1"
    assert 29 < float(headers["x-ratelimit-reset-requests"].rstrip("s")) <= 30
    assert headers["x-ratelimit-limit-tokens"] == "10000"
    refused = answers[2]
    assert refused.error()["code"] == "rate_limit_exceeded"
    assert 25 < int(refused.headers["retry-after"]) <= 30
    assert len(world.records()) == 2
    other = world.token("b")
    assert "x-ratelimit-limit-requests" not in world.post(other).headers


def test_tokens_a_minute_and_at_once(world: World) -> None:
    small = world.token("small", Limits(tokens_per_minute=5))
    refused = world.post(small)
    assert (refused.status, refused.error()["code"]) == (400, "tokens_over_limit")
    busy = world.token("busy", Limits(concurrency=1))
    world.gateway.backend.holds_after = 2
    body = json.dumps({**BODY, "stream": True}).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {busy}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(world.gateway.server.address, timeout=30) as connection:
        connection.sendall(head.encode() + body)
        read_until(connection, b'"content":"e"')
        assert world.post(busy).error()["code"] == "rate_limit_exceeded"
    world.wait_for_records(1)
    world.gateway.backend.holds_after = None
    assert world.post(busy).status == 200


def test_budgets_and_models_of_an_account(world: World) -> None:
    money = world.token("money", Limits(budget_nanos_per_day=1_000_000_000))
    tokens = world.token("tokens", Limits(budget_tokens_per_day=400))
    none = world.token("none", Limits(models=("other",)))
    named = world.token("named", Limits(models=(MODEL,)))
    for token in (money, tokens):
        body = {**BODY, "max_tokens": 20}
        statuses = []
        while not statuses or (statuses[-1] == 200 and len(statuses) < 200):
            answer = world.post(token, body)
            statuses.append(answer.status)
        assert answer.error()["code"] == "budget_exhausted"
        assert answer.status == 402
        assert 0 < int(answer.headers["retry-after"]) <= 86400
        assert len(statuses) > 1
    refused = world.post(none)
    assert (refused.status, refused.error()["code"]) == (403, "model_not_allowed")
    assert world.post(named, {**BODY, "model": ALIAS}).status == 200


def test_lists_show_what_the_account_may_use(start: Callable[..., World]) -> None:
    world = start(aliases={"@cf/tiny": MODEL})
    every = world.token("every")
    by_alias = world.token("by_alias", Limits(models=("@cf/tiny",)))
    by_model = world.token("by_model", Limits(models=(MODEL,)))
    none = world.token("none", Limits(models=("other",)))
    for token, names in (
        (every, [MODEL, ALIAS, "@cf/tiny"]),
        (by_alias, ["@cf/tiny"]),
        (by_model, [MODEL, ALIAS, "@cf/tiny"]),
        (none, []),
    ):
        listed = world.get(token, "/v1/models").json()["data"]
        assert [card["id"] for card in listed] == names
        found = world.get(token, "/ai/models/search").json()
        assert [model["name"] for model in found["result"]] == names
        assert found["result_info"]["total_count"] == len(names)
        for name in (MODEL, ALIAS, "@cf/tiny"):
            retrieved = world.get(token, f"/v1/models/{name}")
            used = world.post(token, {**BODY, "model": name})
            assert retrieved.status == used.status == (200 if name in names else 403)
            if name not in names:
                assert retrieved.error() == used.error()
    assert world.get(none, "/v1/models/nobody").status == 404


def test_the_real_client_sees_its_exceptions(world: World) -> None:
    once = world.token("once", Limits(requests_per_minute=1))
    none = world.token("none", Limits(models=("other",)))
    url = world.gateway.url + "/v1"
    with OpenAI(base_url=url, api_key=once, max_retries=0) as client:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "a"}])
        with pytest.raises(RateLimitError):
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "a"}])
    with (
        OpenAI(base_url=url, api_key=none, max_retries=0) as client,
        pytest.raises(PermissionDeniedError),
    ):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "a"}])


def test_tenants_have_salts_of_their_own(world: World) -> None:
    tokens = [world.token("a"), world.token("b")]
    for token in (*tokens, tokens[0]):
        assert world.post(token).status == 200
    assert world.post(tokens[0], {**BODY, "cache_salt": "mine"}).status == 200
    salts = [salt for _, salt in world.gateway.backend.extras]
    assert salts[0] == salts[2] != salts[1]
    assert len({*salts}) == 3
    assert world.accounts.find("a").cache_salt not in "".join(salts)


def test_open_requests_keep_the_salt_that_they_ask_for(world: World) -> None:
    world.post(None)
    world.post(None, {**BODY, "cache_salt": "mine"})
    assert [salt for _, salt in world.gateway.backend.extras] == ["", "mine"]


def test_usage_is_ones_own(world: World) -> None:
    first, second = world.token("a"), world.token("b")
    admin = world.token("root", is_admin=True)
    for token in (first, first, second):
        world.post(token)
    own = world.get(first, "/usage").json()
    assert [one["account"] for one in own["data"]] == ["a", "a"]
    assert own["totals"][0]["requests"] == 2
    assert world.get(first, "/usage?account=b").status == 400
    assert len(world.get(admin, "/usage").json()["data"]) == 3
    assert len(world.get(admin, "/usage?account=b").json()["data"]) == 1
    grouped = world.get(admin, "/usage?group_by=account,model&from=2020-01-01").json()["groups"]
    assert sorted((one["account"], one["model"], one["requests"]) for one in grouped) == [
        ("a", MODEL, 2),
        ("b", MODEL, 1),
    ]
    page = world.get(admin, "/usage?limit=2").json()
    rest = world.get(admin, f"/usage?limit=2&cursor={page['next_cursor']}").json()
    assert (len(page["data"]), len(rest["data"]), rest["has_more"]) == (2, 1, False)
    table = world.get(admin, "/usage.csv")
    assert table.headers["content-type"].startswith("text/csv")
    assert len(table.body.decode().splitlines()) == 4
    assert world.get(admin, "/usage?to=2020-01-01").json()["data"] == []


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=x", "cursor=-1", "from=yesterday", "group_by=hour", "what=1"]
)
def test_wrong_usage_queries_name_the_field(world: World, query: str) -> None:
    admin = world.token("root", is_admin=True)
    answer = world.get(admin, f"/usage?{query}")
    assert answer.status == 400
    assert answer.error()["param"] == query.partition("=")[0]


def test_paths_name_the_tokens_own_account(world: World) -> None:
    token = world.token("a")
    account_id = world.accounts.find("a").id
    names = ((account_id, 200), ("a", 200), ("%7Baccount_id%7D", 200), ("b", 403), ("0" * 32, 403))
    for name, status in names:
        answer = world.get(token, f"/client/v4/accounts/{name}/ai/models/search")
        assert answer.status == status


def test_events_of_random_length(world: World) -> None:
    body = {**BODY, "stream": True, "stream_options": {"include_obfuscation": True}}
    events = world.post(None, body).events()
    lengths = {len(event["obfuscation"]) for event in events[:-1]}
    assert len(lengths) > 1
    plain = world.post(None, {**BODY, "stream": True}).events()
    assert not any("obfuscation" in event for event in plain[:-1])


def test_secrets_are_never_logged(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    token = world.token("a")
    salt = world.accounts.find("a").cache_salt
    world.gateway.backend.fails_after = 1
    world.post(token)
    world.post(token + "x")
    world.post(None, x_api_key=token)
    revoked = world.accounts.create_token("a")[0]
    world.post(revoked)
    for secret in (token, salt, revoked, token[11:]):
        assert secret not in caplog.text


def test_a_database_that_is_away_serves_those_it_knows(world: World) -> None:
    token = world.token("a")
    assert world.post(token).status == 200

    async def break_the_accounts() -> None:
        store = await gateway_accounting(world).accounts()

        def fail() -> int:
            raise DatabaseUnavailable("gone")

        store.revision = fail  # type: ignore[method-assign]
        await asyncio.sleep(1.2)

    world.gateway.run(break_the_accounts())
    assert world.post(token).status == 200
    assert world.post(new_token()).status == 503
