"""`prediction`: what is refused, who gets it, and how usage tells what came of it."""

from __future__ import annotations

import asyncio
import socket
from array import array
from pathlib import Path

import pytest
from openai import OpenAI

from support.gateway_server import MODEL, RunningGateway
from support.raw_http import request
from support.scripted_backend import say
from support.worker_pool import Consumer, worker_pool
from twinfire.gateway.backends.request_context import RequestContext
from twinfire.gateway.backends.worker_link import WorkerLink
from twinfire.protocol.framing import worker_side_decoder
from twinfire.protocol.messages import Hello, Reserve, Submit
from twinfire.protocol.sampling import SamplingParams
from twinfire.protocol.tokens import pack_ids, unpack_ids

CHAT = "/v1/chat/completions"
RUN = f"/client/v4/accounts/0123456789abcdef/ai/run/{MODEL}"
USER: list[dict[str, object]] = [{"role": "user", "content": "hi"}]
GUESS = pack_ids([7, 8, 9])


def text_of_prediction(gateway: RunningGateway) -> str:
    return bytes(list(unpack_ids(gateway.backend.contexts[-1].prediction))).decode()


def test_a_prediction_goes_to_the_backend_as_tokens(
    gateway: RunningGateway, client: OpenAI
) -> None:
    for content in (
        "new éxample",
        [{"type": "text", "text": "new é"}, {"type": "text", "text": "xample"}],
    ):
        client.chat.completions.create(  # type: ignore[call-overload]
            model=MODEL,
            messages=USER,
            prediction={"type": "content", "content": content},
            n=2,
            logprobs=True,
        )
        assert text_of_prediction(gateway) == "new éxample"


@pytest.mark.parametrize("path", [CHAT, RUN])
@pytest.mark.parametrize("stream", [False, True])
def test_both_chat_dialects_take_it(gateway: RunningGateway, path: str, stream: bool) -> None:
    gateway.backend.script = say("old text")
    prediction = {"type": "content", "content": "old text"}
    body = {"model": MODEL, "messages": USER, "prediction": prediction, "stream": stream}
    assert request(gateway.server.address, "POST", path, body).status == 200
    assert text_of_prediction(gateway) == "old text"


@pytest.mark.parametrize(
    "prediction",
    [None, {"type": "content", "content": ""}, {"type": "content", "content": []}],
)
def test_nothing_may_be_predicted(gateway: RunningGateway, prediction: object) -> None:
    body = {"model": MODEL, "messages": USER, "prediction": prediction}
    assert request(gateway.server.address, "POST", CHAT, body).status == 200
    assert gateway.backend.contexts[-1].prediction == b""


@pytest.mark.parametrize(
    ("prediction", "param", "told"),
    [
        ("text", "prediction", "object"),
        ({"content": "x"}, "prediction.type", "required"),
        ({"type": "content"}, "prediction.content", "required"),
        ({"type": "text", "content": "x"}, "prediction.type", "'text'"),
        ({"type": "content", "content": 5}, "prediction.content", "str | array"),
        ({"type": "content", "content": None}, "prediction.content", "str | array"),
        (
            {"type": "content", "content": [{"type": "image_url", "text": "x"}]},
            "prediction.content[0]",
            "text only",
        ),
        ({"type": "content", "content": [{"type": "text"}]}, "prediction.content[0]", "no text"),
        ({"type": "content", "content": "x" * 513}, "prediction.content", "513 tokens"),
        ({"type": "content", "content": "x" * 99999}, "prediction.content", "512 tokens"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, RUN])
def test_wrong_shapes_are_told(
    gateway: RunningGateway, path: str, prediction: object, param: str, told: str
) -> None:
    body = {"model": MODEL, "messages": USER, "prediction": prediction}
    answer = request(gateway.server.address, "POST", path, body)
    assert answer.status == 400
    text = answer.body.decode()
    assert f"`{param}`" in text
    assert told in text
    assert not gateway.backend.submitted


def test_usage_tells_what_was_drafted(gateway: RunningGateway, client: OpenAI) -> None:
    backend = gateway.backend
    backend.script = say("abcdefgh")
    backend.step_sizes, backend.drafts_per_step = [4, 3, 2], 5
    for stream in (False, True):
        body: dict[str, object] = {"model": MODEL, "messages": USER, "stream": stream}
        if stream:
            body["stream_options"] = {"include_usage": True}
        text = request(gateway.server.address, "POST", CHAT, body).body.decode()
        # Nine tokens with the end token, in three steps, each with one that was not drafted.
        assert '"completion_tokens":9' in text
        assert '"accepted_prediction_tokens":6,"rejected_prediction_tokens":9' in text
    completion = client.completions.create(model=MODEL, prompt="a", max_tokens=20)
    assert completion.usage is not None
    details = completion.usage.completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (6, 9)


def test_tokens_behind_a_stop_string_are_not_accepted_ones(
    gateway: RunningGateway, client: OpenAI
) -> None:
    backend = gateway.backend
    backend.script = say("abcdefgh")
    backend.step_sizes, backend.drafts_per_step = [8], 7
    answer = client.chat.completions.create(  # type: ignore[call-overload]
        model=MODEL,
        messages=USER,
        stop="c",
    )
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert answer.usage.completion_tokens == 3
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (3, 4)
    assert backend.cancelled == [0]


def test_only_the_worker_that_decodes_gets_it_and_so_does_whoever_goes_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with worker_pool(tmp_path) as pool:
            prefill = await pool.join("p", "prefill")
            decode = await pool.join("d", "decode")
            consumer = Consumer(
                pool.backend.submit(
                    array("I", range(100)),
                    SamplingParams(max_tokens=9, seed=1),
                    context=RequestContext(pd_policy="always", prediction=GUESS),
                )
            )
            reserve = await decode.expect(Reserve)
            assert reserve.submit.prediction == GUESS
            assert (await prefill.expect(Submit)).prediction == b""
            decode.accept(reserve.submit.request_id, {0: [5, 6, 7]})
            await consumer.has(3)
            other = await pool.join("other")
            decode.die()
            again = await other.next()
            submit = again.submit if isinstance(again, Reserve) else again
            assert isinstance(submit, Submit)
            assert submit.prediction == GUESS
            assert submit.outputs == (pack_ids([5, 6, 7]),)
            other.accept(submit.request_id, {0: [8, 9]}, finish="stop")
            await consumer.end()
            assert consumer.tokens() == [5, 6, 7, 8, 9]

    asyncio.run(scenario())


def test_a_gateways_own_worker_gets_it() -> None:
    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        _, link = await loop.create_connection(
            lambda: WorkerLink("g", lambda _: None, lambda _: None, lambda: None), sock=ours
        )
        context = RequestContext(prediction=GUESS)
        link.submit(array("I", [1]), SamplingParams(max_tokens=1, seed=1), 0, "", context)
        reader, writer = await asyncio.open_connection(sock=theirs)
        decoder = worker_side_decoder()
        heard: list[object] = []
        while len(heard) < 2:
            heard += decoder.feed(await reader.read(4096))
        hello, submit = heard
        assert isinstance(hello, Hello)
        assert isinstance(submit, Submit)
        assert submit.prediction == GUESS
        link.close()
        writer.close()

    asyncio.run(scenario())
