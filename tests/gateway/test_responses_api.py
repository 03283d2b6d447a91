"""`/v1/responses` through the openai client, over a socket."""

from __future__ import annotations

import json

import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from openai.types.responses import Response

from support.gateway_server import MODEL, RunningGateway
from support.raw_http import open_post, read_until, request
from support.scripted_backend import say
from twinfire.protocol.errors import Overloaded

PATH = "/v1/responses"


def prompt_of(gateway: RunningGateway, index: int = -1) -> str:
    """What the model was asked, without its control tokens."""
    return bytes(token for token in gateway.backend.submitted[index][0] if token < 256).decode()


def test_text(gateway: RunningGateway, client: OpenAI) -> None:
    gateway.backend.script = say("hello there")
    gateway.backend.cached_tokens = 3
    response = client.responses.create(model=MODEL, input="hi", instructions="be kind")
    assert response.output_text == "hello there"
    assert (response.status, response.error, response.incomplete_details) == (
        "completed",
        None,
        None,
    )
    assert prompt_of(gateway) == "system\nbe kinduser\nhiassistant\n"
    usage = response.usage
    assert usage is not None
    assert usage.input_tokens == len(gateway.backend.submitted[-1][0])
    assert usage.output_tokens == len("hello there") + 1
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens_details.cached_tokens == 3


def test_request_is_repeated_in_the_response(gateway: RunningGateway, client: OpenAI) -> None:
    response = client.responses.create(
        model=MODEL,
        input="hi",
        temperature=0.25,
        top_p=0.5,
        max_output_tokens=9,
        metadata={"run": "7"},
        reasoning={"effort": "low"},
        truncation="auto",
        user="somebody",
        store=False,
    )
    assert response.temperature == 0.25
    assert response.top_p == 0.5
    assert response.max_output_tokens == 9
    assert response.metadata == {"run": "7"}
    assert response.reasoning is not None
    assert response.reasoning.effort == "low"
    assert response.truncation == "auto"
    assert response.user == "somebody"
    assert response.store is False
    sampling = gateway.backend.submitted[-1][1]
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.25, 0.5, 9)


def test_output_that_is_cut_is_incomplete(gateway: RunningGateway, client: OpenAI) -> None:
    gateway.backend.script = say("a long story")
    response = client.responses.create(model=MODEL, input="hi", max_output_tokens=4)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output_text == "a lo"
    assert response.output[0].status == "incomplete"  # type: ignore[union-attr]


def test_items_of_every_kind_become_one_conversation(
    gateway: RunningGateway, client: OpenAI
) -> None:
    client.responses.create(
        model=MODEL,
        input=[
            {"role": "developer", "content": "rules"},
            {"role": "user", "content": [{"type": "input_text", "text": "question"}]},
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {
                "type": "message",
                "id": "msg_1",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "answer", "annotations": []}],
            },
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "result"},
        ],
    )
    assert prompt_of(gateway) == (
        "system\nrulesuser\nquestionassistant\nanswertool\nresultassistant\n"
    )


def test_instructions_join_those_of_the_input(gateway: RunningGateway, client: OpenAI) -> None:
    messages = [{"role": "system", "content": "rules"}, {"role": "user", "content": "hi"}]
    client.responses.create(model=MODEL, instructions="be kind", input=messages)  # type: ignore[arg-type]
    assert prompt_of(gateway) == "system\nbe kind\n\nrulesuser\nhiassistant\n"


def test_follow_ups_carry_the_conversation_but_not_its_instructions(
    gateway: RunningGateway, client: OpenAI
) -> None:
    gateway.backend.script = say("one")
    first = client.responses.create(model=MODEL, input="a", instructions="only now")
    gateway.backend.script = say("two")
    second = client.responses.create(model=MODEL, input="b", previous_response_id=first.id)
    branch = client.responses.create(model=MODEL, input="c", previous_response_id=first.id)
    assert branch.previous_response_id == first.id
    client.responses.create(model=MODEL, input="d", previous_response_id=second.id)
    assert prompt_of(gateway) == ("user\naassistant\noneuser\nbassistant\ntwouser\ndassistant\n")
    sessions = {context.affinity for context in gateway.backend.contexts[-4:]}
    assert sessions == {first.id}, "a conversation belongs on one engine"


def test_item_references_are_what_they_name(gateway: RunningGateway, client: OpenAI) -> None:
    gateway.backend.script = say("one")
    first = client.responses.create(model=MODEL, input="a")
    item_id = first.output[0].id
    assert item_id is not None
    client.responses.create(
        model=MODEL,
        input=[
            {"role": "user", "content": "a"},
            {"type": "item_reference", "id": item_id},
            {"role": "user", "content": "b"},
        ],
    )
    assert prompt_of(gateway) == "user\naassistant\noneuser\nbassistant\n"
    with pytest.raises(BadRequestError, match="not stored here"):
        client.responses.create(model=MODEL, input=[{"type": "item_reference", "id": "msg_x"}])


def test_stored_response_can_be_read_and_forgotten(gateway: RunningGateway, client: OpenAI) -> None:
    made = client.responses.create(model=MODEL, input="a", metadata={"k": "v"})
    assert client.responses.retrieve(made.id) == made
    client.responses.delete(made.id)
    with pytest.raises(NotFoundError, match="no response"):
        client.responses.retrieve(made.id)
    with pytest.raises(NotFoundError, match="no response"):
        client.responses.create(model=MODEL, input="b", previous_response_id=made.id)


def test_response_that_is_not_to_be_stored_is_not(gateway: RunningGateway, client: OpenAI) -> None:
    made = client.responses.create(model=MODEL, input="a", store=False)
    with pytest.raises(NotFoundError):
        client.responses.retrieve(made.id)


def test_input_items_by_page(gateway: RunningGateway, client: OpenAI) -> None:
    texts = [f"text {index}" for index in range(5)]
    messages = [{"role": "user", "content": text} for text in texts]
    made = client.responses.create(model=MODEL, input=messages)  # type: ignore[arg-type]
    pages = client.responses.input_items.list(made.id, order="asc", limit=2)
    assert [item.content[0].text for item in pages] == texts  # type: ignore[union-attr]
    newest = client.responses.input_items.list(made.id, limit=1)
    assert newest.data[0].content[0].text == texts[-1]  # type: ignore[union-attr]
    assert newest.has_more


def test_input_tokens(gateway: RunningGateway, client: OpenAI) -> None:
    counted = client.responses.input_tokens.count(model=MODEL, input="hi")
    client.responses.create(model=MODEL, input="hi")
    assert counted.input_tokens == len(gateway.backend.submitted[-1][0])


def test_truncation_leaves_out_the_oldest_turns(gateway: RunningGateway, client: OpenAI) -> None:
    messages = [{"role": "system", "content": "rules"}]
    for index in range(12):
        messages += [
            {"role": "user", "content": f"question {index:02d} " + "x" * 40},
            {"role": "assistant", "content": "y" * 20},
        ]
    messages.append({"role": "user", "content": "last"})
    arguments = {"model": MODEL, "input": messages, "max_output_tokens": 50}
    with pytest.raises(BadRequestError, match="512 tokens") as raised:
        client.responses.create(**arguments)  # type: ignore[call-overload]
    assert raised.value.code == "context_length_exceeded"
    client.responses.create(**arguments, truncation="auto")  # type: ignore[call-overload]
    prompt = prompt_of(gateway)
    assert prompt.startswith("system\nrulesuser\nquestion ")
    assert prompt.endswith("user\nlastassistant\n")
    kept = len(gateway.backend.submitted[-1][0])
    turn = len("<user\nquestion 00 " + "x" * 40 + "><assistant\n" + "y" * 20 + ">")
    assert 512 - 50 - turn < kept <= 512 - 50, "no more is left out than must be"


def test_structured_output_is_asked_of_the_chat(gateway: RunningGateway) -> None:
    # Until a grammar serves it, the refusal names the field of this dialect.
    body: dict[str, object] = {"input": "hi", "text": {"format": {"type": "json_schema"}}}
    answer = request(gateway.server.address, "POST", PATH, body)
    assert answer.status == 400
    assert answer.error()["param"] == "text.format.schema"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": [{"type": "web_search_call"}]}, "input[0]"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice"),
        ({"input": "x", "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"input": "x", "conversation": "conv_1"}, "conversation"),
        ({"input": "x", "background": True, "store": False}, "background"),
        ({"input": "x", "include": ["nonsense"]}, "include"),
        ({"input": "x", "metadata": {"k": "v" * 513}}, "metadata"),
        ({"input": "x", "stream_options": {}}, "stream_options"),
        ({"input": "x", "max_output_tokens": 4096}, "max_output_tokens"),
        ({"input": "x", "temperature": -1}, "temperature"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_fault_names_the_field(
    gateway: RunningGateway, body: dict[str, object], param: str, stream: bool
) -> None:
    sent = {**body, "stream": stream}
    if param == "stream_options":
        sent["stream"] = False
    answer = request(gateway.server.address, "POST", PATH, sent)
    assert answer.status == 400
    error = answer.error()
    assert error["param"] == param
    assert f"`{param}" in str(error["message"])


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "order=up", "after=nothing"])
def test_wrong_query_is_refused(gateway: RunningGateway, client: OpenAI, query: str) -> None:
    made = client.responses.create(model=MODEL, input="a")
    answer = request(gateway.server.address, "GET", f"{PATH}/{made.id}/input_items?{query}")
    assert answer.status == 400
    assert answer.error()["param"] == query.partition("=")[0]


def test_refusal_of_the_worker_is_a_status(gateway: RunningGateway) -> None:
    gateway.backend.refusal = Overloaded("full", retry_after_s=2.5)
    for stream in (False, True):
        answer = request(gateway.server.address, "POST", PATH, {"input": "hi", "stream": stream})
        assert (answer.status, answer.headers["retry-after"]) == (429, "3")


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_ends_the_generation(gateway: RunningGateway, stream: bool) -> None:
    gateway.backend.script = say("a long story")
    gateway.backend.holds_after = 3
    connection = open_post(gateway.server.address, PATH, {"input": "hi", "stream": stream})
    gateway.run(gateway.backend.holding.wait())
    if stream:
        read_until(connection, b"output_text.delta")
    connection.close()
    gateway.run(gateway.backend.idle.wait(), timeout_s=1)
    assert gateway.backend.num_running == 0


def test_every_field_of_the_published_shape_is_there(gateway: RunningGateway) -> None:
    answer = request(gateway.server.address, "POST", PATH, {"input": "hi"}).json()
    Response.model_validate(answer, strict=False)
    # The fields that the Open Responses specification of 2026-04-24 requires.
    required = (
        "id object created_at completed_at status incomplete_details model previous_response_id "
        "instructions output error tools tool_choice truncation parallel_tool_calls text top_p "
        "presence_penalty frequency_penalty top_logprobs temperature reasoning user usage "
        "max_output_tokens max_tool_calls store background service_tier metadata "
        "safety_identifier prompt_cache_key"
    )
    assert set(answer) >= set(required.split())
    assert json.dumps(answer)
