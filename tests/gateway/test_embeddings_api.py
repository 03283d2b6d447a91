"""`/v1/embeddings` through the openai client, over a socket."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from openai import OpenAI

from support.byte_tokenizer import BOS_ID, ByteTokenizer, plain_template
from support.gateway_server import MODEL, RunningGateway, running_gateway, tiny_config
from support.raw_http import open_post, request
from support.scripted_backend import scripted_state
from twinfire.gateway.served_model import TextSide

PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def embedder() -> Iterator[RunningGateway]:
    config = replace(tiny_config(), pooling="last")
    text = TextSide.load(ByteTokenizer(), plain_template(), config)
    with running_gateway(text=text) as gateway:
        yield gateway


@pytest.fixture
def client(embedder: RunningGateway) -> Iterator[OpenAI]:
    with OpenAI(base_url=embedder.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def expected(ids: list[int], dimensions: int = 8) -> np.ndarray:
    state = np.frombuffer(scripted_state(ids), np.float32)[:dimensions]
    return state / np.linalg.norm(state)


def ids_of(text: str) -> list[int]:
    return [BOS_ID, *text.encode()]


def test_every_kind_of_input(embedder: RunningGateway, client: OpenAI) -> None:
    embedder.backend.script = lambda prompt, sampling, choice: []
    for given, ids in (
        ("ab", [ids_of("ab")]),
        (["ab", "cde"], [ids_of("ab"), ids_of("cde")]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ):
        answer = client.embeddings.create(model=MODEL, input=given)  # type: ignore[arg-type]
        assert [one.index for one in answer.data] == list(range(len(ids)))
        for one, own in zip(answer.data, ids, strict=True):
            np.testing.assert_allclose(one.embedding, expected(own), atol=1e-6)
        total = sum(map(len, ids))
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (total, total)


def test_dimensions_and_formats(embedder: RunningGateway, client: OpenAI) -> None:
    floats = client.embeddings.create(
        model=MODEL, input="ab", dimensions=3, encoding_format="float"
    )
    np.testing.assert_allclose(floats.data[0].embedding, expected(ids_of("ab"), 3), atol=1e-6)
    body: dict[str, object] = {"input": "ab", "dimensions": 3, "encoding_format": "base64"}
    raw = request(embedder.server.address, "POST", PATH, body).json()
    packed = raw["data"][0]["embedding"]  # type: ignore[index]
    unpacked = np.frombuffer(base64.b64decode(packed), "<f4")
    np.testing.assert_allclose(unpacked, floats.data[0].embedding, atol=1e-7)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [300]}, "input"),
        ({"input": "x" * 600}, "input"),
        ({"input": "a", "dimensions": 9}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "stream": True}, "stream"),
    ],
)
def test_fault_names_the_field(
    embedder: RunningGateway, body: dict[str, object], param: str
) -> None:
    answer = request(embedder.server.address, "POST", PATH, body)
    assert answer.status == 400
    error = answer.error()
    assert error["param"] == param


def test_long_input_can_be_cut(embedder: RunningGateway) -> None:
    body: dict[str, object] = {"input": "x" * 600, "truncate_prompt_tokens": 10}
    answer = request(embedder.server.address, "POST", PATH, body)
    assert answer.json()["usage"] == {"prompt_tokens": 10, "total_tokens": 10}


def test_generating_model_embeds_nothing(gateway: RunningGateway) -> None:
    answer = request(gateway.server.address, "POST", PATH, {"input": "a"})
    assert (answer.status, answer.error()["param"]) == (400, "model")


def test_client_that_leaves_ends_the_work(embedder: RunningGateway) -> None:
    embedder.backend.holds_after = -1
    connection = open_post(embedder.server.address, PATH, {"input": ["a", "b"]})
    embedder.run(embedder.backend.holding.wait())
    connection.close()
    embedder.run(embedder.backend.idle.wait(), timeout_s=1)
    embedder.backend.holds_after = None
