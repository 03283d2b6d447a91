"""`?queueRequest=true` against a running server: batches that give way, end, and outlive it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.gateway_server import ALIAS, MODEL, RunningGateway, running_gateway
from support.raw_http import Answer, open_post, request
from support.scripted_backend import ScriptedBackend, say
from twinfire.accounts.account_store import AccountStore
from twinfire.accounts.database import open_database
from twinfire.accounts.limits import NO_LIMITS, Limits
from twinfire.accounts.usage_store import UsageFilter, UsageStore
from twinfire.gateway.settings import GatewaySettings
from twinfire.protocol.errors import WorkerLost

PATH = f"/client/v4/accounts/x/ai/run/{MODEL}?queueRequest=true"
CHAT: dict[str, object] = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def database(tmp_path: Path) -> str:
    return str(tmp_path / "state.sqlite")


@pytest.fixture
def gateway(database: str) -> Iterator[RunningGateway]:
    with running_gateway(GatewaySettings(database=database)) as running:
        yield running
        running.loop.call_soon_threadsafe(running.backend.released.set)


def post(gateway: RunningGateway, body: object, path: str = PATH) -> Answer:
    return request(gateway.server.address, "POST", path, body)  # type: ignore[arg-type]


def result(answer: Answer) -> dict[str, Any]:
    body: dict[str, Any] = answer.json()
    assert answer.status == 200, body
    assert body["success"] is True
    return body["result"]


def submit(gateway: RunningGateway, *requests: dict[str, object]) -> str:
    ticket = result(post(gateway, {"requests": list(requests)}))
    assert (ticket["status"], ticket["model"]) == ("queued", MODEL)
    batch_id: str = ticket["request_id"]
    return batch_id


def poll(gateway: RunningGateway, batch_id: str) -> dict[str, Any]:
    return result(post(gateway, {"request_id": batch_id}))


def wait_for(gateway: RunningGateway, batch_id: str, limit_s: float = 20) -> dict[str, Any]:
    """The result of a batch, once it has one."""
    deadline_s = time.monotonic() + limit_s
    while "responses" not in (answer := poll(gateway, batch_id)):
        assert answer["status"] in ("queued", "running")
        assert time.monotonic() < deadline_s, answer
        time.sleep(0.02)
    return answer


def wait_until(condition: Callable[[], bool], limit_s: float = 10) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_batch_is_computed_and_kept(gateway: RunningGateway) -> None:
    gateway.backend.script = lambda prompt, sampling, choice: list(prompt)[-15:-12]
    texts = ["one", "two", "six"]
    requests: list[dict[str, object]] = [
        {"prompt": text, "raw": True, "max_tokens": 3} for text in texts
    ]
    requests[1]["external_reference"] = "second"
    requests.append({"prompt": "x" * 600})
    gateway.backend.script = lambda prompt, sampling, choice: list(prompt)[1:4]
    batch_id = submit(gateway, *requests)
    done = wait_for(gateway, batch_id)
    responses = done["responses"]
    assert [one["id"] for one in responses] == [0, 1, 2, 3]
    assert [one["external_reference"] for one in responses] == [None, "second", None, None]
    assert [one["success"] for one in responses] == [True, True, True, False]
    assert [one["result"]["response"] for one in responses[:3]] == texts
    assert responses[3]["result"] == {}
    assert responses[3]["errors"][0]["code"] == 5006
    used = [one["result"]["usage"] for one in responses[:3]]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert done["usage"][name] == sum(one[name] for one in used)
    assert poll(gateway, batch_id) == done


def test_queued_requests_have_the_lowest_priority_and_never_wait(gateway: RunningGateway) -> None:
    urgent: dict[str, object] = {"priority": -5, "options": {"rejectIfBusy": False}}
    batch_id = submit(gateway, {**CHAT, **urgent}, CHAT)
    wait_for(gateway, batch_id)
    assert [priority for priority, _ in gateway.backend.extras] == [2**31 - 1] * 2
    for context in gateway.backend.contexts:
        assert context.reject_if_busy
        assert context.affinity == batch_id


def test_a_batch_gives_way_to_whoever_waits(gateway: RunningGateway) -> None:
    backend = gateway.backend
    # 256 sequences: 128 for batches alone, 16 beside others.
    backend.script, backend.holds_after = say("text"), 1
    batch_id = submit(gateway, *([CHAT] * 150))
    wait_until(lambda: backend.num_running == 128)
    stream = open_post(gateway.server.address, "/v1/chat/completions", {**CHAT, "stream": True})
    wait_until(lambda: backend.num_running == 16 + 1)
    assert poll(gateway, batch_id)["status"] == "running"
    stream.close()
    wait_until(lambda: backend.num_running == 128)
    gateway.loop.call_soon_threadsafe(backend.released.set)
    responses = wait_for(gateway, batch_id)["responses"]
    assert [one["result"]["response"] for one in responses] == ["text"] * 150


def test_a_batch_survives_its_gateway(database_url: str) -> None:
    settings = GatewaySettings(database=database_url)

    def holding() -> ScriptedBackend:
        backend = ScriptedBackend(script=say("first life"))
        backend.holds_after = 2
        return backend

    with running_gateway(settings, holding) as first:
        batch_id = submit(first, CHAT, CHAT, CHAT)
        wait_until(lambda: first.backend.num_running == 3)
        assert poll(first, batch_id)["status"] == "running"
    with running_gateway(settings, lambda: ScriptedBackend(script=say("second life"))) as second:
        responses = wait_for(second, batch_id)["responses"]
    assert [one["result"]["response"] for one in responses] == ["second life"] * 3


def test_a_batch_can_be_cancelled(gateway: RunningGateway) -> None:
    backend = gateway.backend
    backend.holds_after = 1
    batch_id = submit(gateway, CHAT, CHAT)
    wait_until(lambda: backend.num_running == 2)
    ended = result(post(gateway, {"request_id": batch_id, "cancel": True}))
    assert (ended["status"], ended["responses"], ended["request_id"]) == ("cancelled", [], batch_id)
    assert poll(gateway, batch_id) == ended


def test_a_lost_worker_is_tried_again_but_not_for_ever(gateway: RunningGateway) -> None:
    gateway.backend.refusal = WorkerLost("the worker died")
    batch_id = submit(gateway, CHAT)
    wait_until(lambda: len(gateway.backend.submitted) >= 2)
    gateway.backend.refusal = None
    gateway.backend.script = say("at last")
    assert wait_for(gateway, batch_id)["responses"][0]["result"]["response"] == "at last"
    gateway.backend.refusal = WorkerLost("the worker died")
    gateway.backend.submitted.clear()
    [response] = wait_for(gateway, submit(gateway, CHAT))["responses"]
    assert response["success"] is False
    assert response["errors"][0]["code"] == 7009
    assert len(gateway.backend.submitted) == 5


def test_a_model_that_is_not_ready_yet_is_waited_for(gateway: RunningGateway) -> None:
    backend = gateway.backend
    backend.unready_reason = "loading: weights"
    batch_id = submit(gateway, CHAT)
    time.sleep(0.3)
    assert poll(gateway, batch_id)["status"] == "queued"
    backend.unready_reason = None
    assert wait_for(gateway, batch_id)["responses"][0]["success"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "`requests`"),
        ({"requests": []}, "`requests`"),
        ({"requests": [CHAT] * 10_001}, "10001 entries; the limit is 10000"),
        ({"requests": [CHAT, {}]}, "`requests[1]`"),
        ({"requests": [{**CHAT, "temperature": "hot"}]}, "`temperature`"),
        ({"requests": [{**CHAT, "stream": True}]}, "`stream` cannot be queued"),
        ({"requests": [{**CHAT, "external_reference": "x" * 1025}]}, "the limit is 1024"),
        ({"requests": [1]}, "`requests`"),
        ({"requests": "x"}, "`requests`"),
        ({"request_id": "no-such-batch"}, "no batch `no-such-batch`"),
        ({"request_id": 1}, "`request_id`"),
    ],
)
def test_a_wrong_batch_is_refused(
    gateway: RunningGateway, body: dict[str, object], words: str
) -> None:
    answer = post(gateway, body)
    error: Any = answer.json()
    assert (answer.status, error["errors"][0]["code"]) == (400, 5006)
    assert words in error["errors"][0]["message"]


def test_limits_of_the_path_and_the_size(gateway: RunningGateway) -> None:
    large = b'{"requests":[{"prompt":"' + b"x" * 10_000_000 + b'"}]}'
    answer = post(gateway, large)
    assert (answer.status, answer.json()["errors"][0]["code"]) == (413, 3006)  # type: ignore[index]
    unknown = post(gateway, {"requests": [CHAT]}, "/ai/run/nobody?queueRequest=true")
    assert unknown.json()["errors"][0]["code"] == 5007  # type: ignore[index]
    odd = post(gateway, {"requests": [CHAT]}, f"/ai/run/{MODEL}?queueRequest=maybe")
    assert odd.status == 400
    now = post(gateway, CHAT, f"/ai/run/{MODEL}?queueRequest=false")
    assert "response" in result(now)
    # Asked for under another name of the model it is another model's.
    batch_id = submit(gateway, CHAT)
    other = post(gateway, {"request_id": batch_id}, f"/ai/run/{ALIAS}?queueRequest=true")
    assert other.status == 400


def test_a_stop_puts_back_what_runs_at_once(database_url: str) -> None:
    settings = GatewaySettings(database=database_url, drain_timeout_s=60)
    with running_gateway(settings) as gateway:
        gateway.backend.holds_after = 1
        submit(gateway, CHAT)
        wait_until(lambda: gateway.backend.num_running == 1)
        gateway.stop()
        asyncio.run_coroutine_threadsafe(gateway.backend.idle.wait(), gateway.loop).result(10)


def test_a_batch_belongs_to_its_account_and_is_billed_once(database_url: str) -> None:
    opened = open_database(database_url)
    accounts, ledger = AccountStore(opened), UsageStore(opened)
    tokens = {}
    for name in ("ann", "bob"):
        accounts.create(name, NO_LIMITS)
        tokens[name] = {"authorization": "Bearer " + accounts.create_token(name)[0]}
    path = f"/ai/run/{MODEL}?queueRequest=true"

    def ask(gateway: RunningGateway, name: str, body: dict[str, object]) -> Answer:
        return request(gateway.server.address, "POST", path, body, tokens[name])

    with running_gateway(GatewaySettings(database=database_url)) as gateway:
        backend = gateway.backend
        backend.script, backend.holds_after = say("text"), 1
        ticket = result(ask(gateway, "ann", {"requests": [CHAT] * 20}))
        batch: dict[str, object] = {"request_id": ticket["request_id"]}
        wait_until(lambda: backend.num_running == 20)
        # Four are put back while bob waits, and computed again.
        bobs = open_post(
            gateway.server.address, "/v1/completions", {"prompt": "x"}, list(tokens["bob"].items())
        )
        wait_until(lambda: backend.num_running == 16 + 1)
        assert ask(gateway, "bob", batch).status == 400
        assert ask(gateway, "bob", {**batch, "cancel": True}).status == 400
        gateway.loop.call_soon_threadsafe(backend.released.set)
        wait_until(lambda: "responses" in result(ask(gateway, "ann", batch)))
        assert len(result(ask(gateway, "ann", batch))["responses"]) == 20
        bobs.close()
        records = [one for _, one in ledger.page(UsageFilter(), 1000)]
    anns = [one for one in records if one.account_id == accounts.find("ann").id]
    assert len(anns) == 20
    assert {one.outcome for one in anns} == {"finished"}
    assert {one.request_id for one in anns} == {f"{batch['request_id']}-{n}" for n in range(20)}
    opened.close()


def test_a_batch_for_a_model_that_the_account_may_not_use_is_refused(database: str) -> None:
    opened = open_database(database)
    accounts = AccountStore(opened)
    accounts.create("ann", Limits(models=("other",)))
    headers = {"authorization": "Bearer " + accounts.create_token("ann")[0]}
    opened.close()
    with running_gateway(GatewaySettings(database=database)) as gateway:
        path, body = f"/ai/run/{MODEL}?queueRequest=true", {"requests": [CHAT]}
        queued = request(gateway.server.address, "POST", path, body, headers)
        direct = request(gateway.server.address, "POST", f"/ai/run/{MODEL}", CHAT, headers)
    assert queued.status == direct.status == 403
    codes = [[one["code"] for one in answer.json()["errors"]] for answer in (queued, direct)]
    assert codes == [[5018], [5018]]


def test_a_rate_that_is_used_up_is_waited_for(database: str) -> None:
    opened = open_database(database)
    accounts = AccountStore(opened)
    accounts.create("ann", Limits(requests_per_minute=1))
    token = {"authorization": "Bearer " + accounts.create_token("ann")[0]}
    path = f"/ai/run/{MODEL}?queueRequest=true"
    with running_gateway(GatewaySettings(database=database)) as gateway:
        body: dict[str, object] = {"requests": [CHAT] * 2}
        ticket = result(request(gateway.server.address, "POST", path, body, token))
        poll_body: dict[str, object] = {"request_id": ticket["request_id"]}

        def state() -> dict[str, Any]:
            return result(request(gateway.server.address, "POST", path, poll_body, token))

        wait_until(lambda: state()["num_finished"] == 1)
        time.sleep(0.5)
        assert (state()["status"], state()["num_finished"]) == ("running", 1)
        assert len(gateway.backend.submitted) == 1
    opened.close()
