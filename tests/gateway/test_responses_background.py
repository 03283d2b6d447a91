"""Responses in the background: polled, streamed from anywhere, called off."""

from __future__ import annotations

import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from support.gateway_server import MODEL, RunningGateway, running_gateway
from support.raw_http import open_post, read_until, request
from support.scripted_backend import say
from twinfire.protocol.errors import WorkerLost

PATH = "/v1/responses"


def release(gateway: RunningGateway) -> None:
    gateway.loop.call_soon_threadsafe(gateway.backend.released.set)


def held(gateway: RunningGateway, after: int = 3) -> None:
    gateway.backend.script = say("a long story")
    gateway.backend.released.clear()
    gateway.backend.holding.clear()
    gateway.backend.holds_after = after


def settled(client: OpenAI, response_id: str) -> str | None:
    """The events of a response that runs end once it is stored."""
    for _ in range(1000):
        response = client.responses.retrieve(response_id)
        if response.status not in ("queued", "in_progress"):
            return response.status
    raise AssertionError("the response did not end")


def test_polling(gateway: RunningGateway, client: OpenAI) -> None:
    held(gateway)
    made = client.responses.create(model=MODEL, input="hi", background=True)
    assert (made.status, made.background, made.output) == ("queued", True, [])
    gateway.run(gateway.backend.holding.wait())
    assert client.responses.retrieve(made.id).status == "in_progress"
    release(gateway)
    assert settled(client, made.id) == "completed"
    done = client.responses.retrieve(made.id)
    assert done.output_text == "a long story"
    follow_up = client.responses.create(model=MODEL, input="b", previous_response_id=made.id)
    assert follow_up.status == "completed"


def test_follow_up_of_a_running_response_is_refused(
    gateway: RunningGateway, client: OpenAI
) -> None:
    held(gateway)
    made = client.responses.create(model=MODEL, input="hi", background=True)
    gateway.run(gateway.backend.holding.wait())
    with pytest.raises(BadRequestError, match="previous_response_id"):
        client.responses.create(model=MODEL, input="b", previous_response_id=made.id)
    release(gateway)
    assert settled(client, made.id) == "completed"


def test_stream_that_is_cut_is_taken_up_where_it_was(
    gateway: RunningGateway, client: OpenAI
) -> None:
    held(gateway)
    body = {"input": "hi", "background": True, "stream": True}
    connection = open_post(gateway.server.address, PATH, body)
    received = read_until(connection, b'"delta":" "').decode()
    connection.close()
    response_id = received.split('"id":"', 1)[1].split('"', 1)[0]
    assert gateway.backend.num_running == 1, "the response goes on without its client"
    release(gateway)
    rest = list(client.responses.retrieve(response_id, stream=True, starting_after=6))
    assert [event.sequence_number for event in rest] == list(range(7, 7 + len(rest)))
    assert rest[-1].type == "response.completed"
    assert settled(client, response_id) == "completed"
    again = list(client.responses.retrieve(response_id, stream=True))
    assert [event.sequence_number for event in again] == list(range(len(again)))
    assert again[7:] == rest
    assert [event.type for event in again[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    text = "".join(event.delta for event in again if event.type == "response.output_text.delta")
    assert text == "a long story"


def test_many_clients_watch_one_response(gateway: RunningGateway, client: OpenAI) -> None:
    held(gateway)
    made = client.responses.create(model=MODEL, input="hi", background=True, stream=True)
    response_id = next(iter(made)).response.id  # type: ignore[union-attr]
    watchers = [client.responses.retrieve(response_id, stream=True) for _ in range(3)]
    release(gateway)
    events = [list(watcher) for watcher in watchers]
    assert events[0] == events[1] == events[2]
    assert events[0][-1].type == "response.completed"


def test_cancel(gateway: RunningGateway, client: OpenAI) -> None:
    held(gateway)
    made = client.responses.create(model=MODEL, input="hi", background=True)
    gateway.run(gateway.backend.holding.wait())
    assert client.responses.cancel(made.id).status == "cancelled"
    gateway.run(gateway.backend.idle.wait(), timeout_s=1)
    again = client.responses.cancel(made.id)
    assert again.status == "cancelled", "calling off twice changes nothing"
    assert again.output_text == "a l"
    with pytest.raises(BadRequestError, match="cancelled"):
        client.responses.create(model=MODEL, input="b", previous_response_id=made.id)


def test_cancel_before_the_prompt(gateway: RunningGateway, client: OpenAI) -> None:
    held(gateway, after=-1)
    made = client.responses.create(model=MODEL, input="hi", background=True, stream=True)
    events = iter(made)
    response_id = next(events).response.id  # type: ignore[union-attr]
    assert client.responses.cancel(response_id).status == "cancelled"
    last = list(events)[-1]
    assert last.type == "response.incomplete"
    assert last.response.status == "cancelled"
    gateway.run(gateway.backend.idle.wait(), timeout_s=1)


def test_only_background_responses_can_be_called_off(
    gateway: RunningGateway, client: OpenAI
) -> None:
    made = client.responses.create(model=MODEL, input="hi")
    with pytest.raises(BadRequestError, match="background"):
        client.responses.cancel(made.id)
    with pytest.raises(BadRequestError, match="streamed again"):
        client.responses.retrieve(made.id, stream=True)
    with pytest.raises(NotFoundError):
        client.responses.cancel("resp_0")


def test_deleting_ends_what_runs(gateway: RunningGateway, client: OpenAI) -> None:
    held(gateway)
    made = client.responses.create(model=MODEL, input="hi", background=True)
    gateway.run(gateway.backend.holding.wait())
    client.responses.delete(made.id)
    gateway.run(gateway.backend.idle.wait(), timeout_s=1)
    with pytest.raises(NotFoundError):
        client.responses.retrieve(made.id)


@pytest.mark.parametrize("fails_after", [0, 4])
def test_failure_is_kept(gateway: RunningGateway, client: OpenAI, fails_after: int) -> None:
    gateway.backend.script = say("a long story")
    gateway.backend.fails_after = fails_after
    made = client.responses.create(model=MODEL, input="hi", background=True)
    assert settled(client, made.id) == "failed"
    failed = client.responses.retrieve(made.id)
    assert failed.error is not None
    assert failed.error.code == "server_error"
    assert failed.output_text == "a long story"[:fails_after]


def test_refusal_is_a_failed_response(gateway: RunningGateway, client: OpenAI) -> None:
    gateway.backend.refusal = WorkerLost("gone")
    events = list(client.responses.create(model=MODEL, input="hi", background=True, stream=True))
    assert [event.type for event in events] == [
        "response.created",
        "response.queued",
        "response.failed",
    ]


def test_fault_of_the_request_is_a_status(gateway: RunningGateway) -> None:
    body: dict[str, object] = {"input": "x", "background": True, "max_output_tokens": 4096}
    assert request(gateway.server.address, "POST", PATH, body).status == 400


def test_server_that_stops_waits_for_what_runs() -> None:
    with running_gateway() as gateway:
        held(gateway)
        body: dict[str, object] = {"input": "hi", "background": True}
        assert request(gateway.server.address, "POST", PATH, body).status == 200
        gateway.run(gateway.backend.holding.wait())
        gateway.stop()
        assert gateway.backend.num_running == 1
        release(gateway)
