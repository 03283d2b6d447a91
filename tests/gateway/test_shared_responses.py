"""Two gateways on one database, of either kind: what one stores, the other reads and calls off."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from openai import NotFoundError, OpenAI

from support.byte_tokenizer import ByteTokenizer
from support.gateway_server import MODEL, RunningGateway, running_gateway
from support.scripted_backend import ScriptedBackend, say
from twinfire.gateway.settings import GatewaySettings


@pytest.fixture
def gateways(database_url: str) -> Iterator[tuple[RunningGateway, RunningGateway]]:
    settings = GatewaySettings(database=database_url)

    def backend() -> ScriptedBackend:
        return ScriptedBackend(script=say("a long story"))

    with running_gateway(settings, backend) as one, running_gateway(settings, backend) as other:
        yield one, other
        one.loop.call_soon_threadsafe(one.backend.released.set)


@pytest.fixture
def clients(gateways: tuple[RunningGateway, RunningGateway]) -> Iterator[list[OpenAI]]:
    made = [OpenAI(base_url=g.url + "/v1", api_key="none", max_retries=0) for g in gateways]
    yield made
    for client in made:
        client.close()


def test_a_conversation_goes_on_at_another_gateway(
    gateways: tuple[RunningGateway, RunningGateway], clients: list[OpenAI]
) -> None:
    one, other = clients
    first = one.responses.create(model=MODEL, input="the first question")
    read = other.responses.retrieve(first.id)
    assert read.output_text == first.output_text == "a long story"
    second = other.responses.create(model=MODEL, input="more", previous_response_id=first.id)
    prompt = ByteTokenizer().decode(gateways[1].backend.submitted[-1][0], False)
    assert "the first question" in prompt
    assert "a long story" in prompt
    one.responses.delete(second.id)
    with pytest.raises(NotFoundError):
        other.responses.retrieve(second.id)


def test_what_one_gateway_runs_the_other_follows_and_calls_off(
    gateways: tuple[RunningGateway, RunningGateway], clients: list[OpenAI]
) -> None:
    one, other = clients
    backend = gateways[0].backend
    backend.holds_after = 3
    made = one.responses.create(model=MODEL, input="hi", background=True)
    gateways[0].run(backend.holding.wait())
    assert other.responses.retrieve(made.id).status == "queued"
    other.responses.cancel(made.id)
    deadline_s = time.monotonic() + 15
    while backend.num_running:
        assert time.monotonic() < deadline_s, "the gateway that computes it was not told"
        time.sleep(0.02)
    while (status := one.responses.retrieve(made.id).status) == "in_progress":
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    assert status == other.responses.retrieve(made.id).status == "cancelled"
