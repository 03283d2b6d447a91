from __future__ import annotations

import pytest
from openai import OpenAI

from support.byte_tokenizer import BOS_ID, EOS_ID
from support.gateway_server import MODEL, RunningGateway, running_gateway
from support.raw_http import request
from support.scripted_backend import ScriptedBackend, say, scripted_logprob, worker_info


def test_prompt_forms(gateway: RunningGateway, client: OpenAI) -> None:
    gateway.backend.script = lambda prompt, sampling, choice: list(chr(prompt[-1]).upper().encode())
    forms: list[tuple[object, list[list[int]]]] = [
        ("ab", [[BOS_ID, 97, 98]]),
        (["ab", "c"], [[BOS_ID, 97, 98], [BOS_ID, 99]]),
        ([97, 98], [[97, 98]]),
        ([[97, 98], [99]], [[97, 98], [99]]),
    ]
    for prompt, expected in forms:
        gateway.backend.submitted.clear()
        answer = client.completions.create(model=MODEL, prompt=prompt)  # type: ignore[arg-type]
        assert [list(ids) for ids, _ in gateway.backend.submitted] == expected
        assert [choice.text for choice in answer.choices] == [
            chr(ids[-1]).upper() for ids in expected
        ]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == sum(map(len, expected))


def test_choice_index_counts_over_prompts(gateway: RunningGateway, client: OpenAI) -> None:
    gateway.backend.script = lambda prompt, sampling, choice: list(
        f"{chr(prompt[-1])}{choice}".encode()
    )
    answer = client.completions.create(model=MODEL, prompt=["a", "b"], n=2)
    assert [(choice.index, choice.text) for choice in answer.choices] == [
        (0, "a0"),
        (1, "a1"),
        (2, "b0"),
        (3, "b1"),
    ]
    texts = ["", "", "", ""]
    reasons: list[str | None] = [None] * 4
    for chunk in client.completions.create(model=MODEL, prompt=["a", "b"], n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == ["a0", "a1", "b0", "b1"]
    assert reasons == ["stop"] * 4


def test_output_is_bounded_by_sixteen_and_by_the_window(
    gateway: RunningGateway, client: OpenAI
) -> None:
    client.completions.create(model=MODEL, prompt="a")
    assert gateway.backend.submitted[-1][1].max_tokens == 16
    client.completions.create(model=MODEL, prompt=[97] * 509)
    assert gateway.backend.submitted[-1][1].max_tokens == 3


@pytest.mark.parametrize("logprobs", [None, 0, 1, 5])
@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(
    gateway: RunningGateway, client: OpenAI, logprobs: int | None, stream: bool
) -> None:
    gateway.backend.script = say("ab!é")
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    if stream:
        chunks = list(
            client.completions.create(model=MODEL, prompt="x", logprobs=logprobs, stream=True)
        )
    else:
        chunks = [client.completions.create(model=MODEL, prompt="x", logprobs=logprobs)]
    found = [choice.logprobs for chunk in chunks for choice in chunk.choices]
    if logprobs is None:
        assert found == [None] * len(found)
        return
    for entry in found:
        assert entry is not None
        tokens += entry.tokens or []
        token_logprobs += entry.token_logprobs or []
        tops += entry.top_logprobs or []
        offsets += entry.text_offset or []
    drawn = [*"ab!é".encode(), EOS_ID]
    assert tokens == ["a", "b", "!", "\ufffd", "\ufffd", "<|eos|>"]
    assert offsets == [0, 1, 2, 3, 3, 4]
    expected = [max(scripted_logprob(token), -9999.0) for token in drawn]
    assert token_logprobs == expected
    for token, top in zip(tokens, tops, strict=True):
        assert top is not None
        assert token in top
        assert logprobs <= len(top) <= logprobs + 1


def test_echo_without_output_scores_the_prompt(gateway: RunningGateway, client: OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=[[104, 105], [111]], echo=True, max_tokens=0, logprobs=1
    )
    first, second = answer.choices
    assert (first.text, second.text) == ("hi", "o")
    assert first.logprobs is not None
    assert first.logprobs.tokens == ["h", "i"]
    assert first.logprobs.token_logprobs == [None, scripted_logprob(105)]
    assert first.logprobs.top_logprobs is not None
    assert first.logprobs.top_logprobs[0] is None
    assert "i" in first.logprobs.top_logprobs[1]
    assert first.logprobs.text_offset == [0, 1]
    assert first.finish_reason == "length"
    sampling = gateway.backend.submitted[-1][1]
    assert (sampling.prompt_logprobs, sampling.max_tokens) == (1, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_output_counts_offsets_on(
    gateway: RunningGateway, client: OpenAI, stream: bool
) -> None:
    gateway.backend.script = say("lo")
    fields = {"model": MODEL, "prompt": [*b"hel"], "echo": True, "logprobs": 0, "n": 2}
    texts = ["", ""]
    tokens: list[list[str]] = [[], []]
    offsets: list[list[int]] = [[], []]
    answers = client.completions.create(**fields, stream=stream)  # type: ignore[call-overload]
    for answer in answers if stream else [answers]:
        for choice in answer.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.tokens
            offsets[choice.index] += choice.logprobs.text_offset
    assert texts == ["hello"] * 2
    assert tokens == [["h", "e", "l", "l", "o", "<|eos|>"]] * 2
    assert offsets == [[0, 1, 2, 3, 4, 5]] * 2


def test_long_prompt_is_scored_whole() -> None:
    with running_gateway(
        make_backend=lambda: ScriptedBackend(worker_info=worker_info(5000))
    ) as own:
        prompt = [97 + index % 7 for index in range(4000)]
        body: dict[str, object] = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 1}
        plain = request(own.server.address, "POST", "/v1/completions", body).json()
        streamed = request(
            own.server.address, "POST", "/v1/completions", {**body, "stream": True, "seed": 1}
        ).events()
    for logprobs in (plain["choices"][0]["logprobs"], streamed[0]["choices"][0]["logprobs"]):  # type: ignore[index]
        scores = logprobs["token_logprobs"][:4000]
        assert scores == [None, *map(scripted_logprob, prompt[1:])]


def test_same_prompt_logprobs_twice(gateway: RunningGateway) -> None:
    body: dict[str, object] = {"prompt": "again", "prompt_logprobs": 2, "max_tokens": 1}
    answers = []
    for cached_tokens in (0, 4):
        gateway.backend.cached_tokens = cached_tokens
        answer = request(gateway.server.address, "POST", "/v1/completions", body)
        (choice,) = answer.json()["choices"]  # type: ignore[misc]
        assert len(choice["prompt_logprobs"]) == len("again") + 1
        answers.append(choice["prompt_logprobs"])
    assert answers[0] == answers[1]


def test_prompt_cut_inside_a_character(gateway: RunningGateway, client: OpenAI) -> None:
    emoji = "😀".encode()
    gateway.backend.script = lambda prompt, sampling, choice: [*emoji[2:], *b" ok"]
    prompt = [*b"long prompt ", *emoji[:2]]
    answer = client.completions.create(model=MODEL, prompt=prompt)
    assert answer.choices[0].text == "😀 ok"
    stream = client.completions.create(model=MODEL, prompt=prompt, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "😀 ok"
    echoed = client.completions.create(model=MODEL, prompt=prompt, echo=True)
    assert echoed.choices[0].text == "long prompt 😀 ok"


def test_odd_ids_from_the_worker_are_no_text(gateway: RunningGateway, client: OpenAI) -> None:
    gateway.backend.script = lambda prompt, sampling, choice: [97, 262, 2**32 - 1, 256, 98]
    answer = client.completions.create(model=MODEL, prompt="x", logprobs=1)
    assert answer.choices[0].text == "ab"


def test_token_ids_in_a_stream(gateway: RunningGateway) -> None:
    gateway.backend.script = say("ab")
    body = {"prompt": [120], "stream": True, "return_token_ids": True}
    events = request(gateway.server.address, "POST", "/v1/completions", body).events()
    choices = [event["choices"][0] for event in events[:-1]]  # type: ignore[index]
    assert choices[0]["prompt_token_ids"] == [120]
    assert [token for choice in choices for token in choice["token_ids"]] == [*b"ab", EOS_ID]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"truncate_prompt_tokens": 2}, [100, 101]),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, [97, 98]),
        ({"truncate_prompt_tokens": -1}, [97, 98, 99, 100, 101]),
    ],
)
def test_truncation(
    gateway: RunningGateway, client: OpenAI, fields: dict[str, object], expected: list[int]
) -> None:
    client.completions.create(model=MODEL, prompt=[*b"abcde"], extra_body=fields)
    assert list(gateway.backend.submitted[-1][0]) == expected


def test_truncation_leaves_room_for_the_output(gateway: RunningGateway, client: OpenAI) -> None:
    client.completions.create(
        model=MODEL, prompt="x" * 5000, max_tokens=12, extra_body={"truncate_prompt_tokens": -1}
    )
    assert len(gateway.backend.submitted[-1][0]) == 500


def test_seed_is_shared_by_prompts_or_drawn_for_each(
    gateway: RunningGateway, client: OpenAI
) -> None:
    client.completions.create(model=MODEL, prompt=["a", "b"], seed=5)
    assert [sampling.seed for _, sampling in gateway.backend.submitted[-2:]] == [5, 5]
    client.completions.create(model=MODEL, prompt=["a", "b"])
    first, second = (sampling.seed for _, sampling in gateway.backend.submitted[-2:])
    assert first != second


def test_special_tokens_are_added_unless_refused(gateway: RunningGateway, client: OpenAI) -> None:
    client.completions.create(model=MODEL, prompt="a", extra_body={"add_special_tokens": False})
    assert list(gateway.backend.submitted[-1][0]) == [97]


def test_special_tokens_are_shown_when_asked_for(gateway: RunningGateway, client: OpenAI) -> None:
    gateway.backend.script = lambda prompt, sampling, choice: [97, 258, 98]
    answer = client.completions.create(
        model=MODEL, prompt="a", extra_body={"skip_special_tokens": False}
    )
    assert answer.choices[0].text == "a<|start|>b"


def test_tokenize_and_back(gateway: RunningGateway) -> None:
    address = gateway.server.address
    answer = request(
        address, "POST", "/tokenize", {"prompt": "hé", "return_token_strs": True}
    ).json()
    assert answer == {
        "count": 4,
        "max_model_len": 512,
        "tokens": [BOS_ID, 104, 195, 169],
        "token_strs": ["<|bos|>", "h", "\ufffd", "\ufffd"],
    }
    messages = [{"role": "user", "content": "x"}]
    chat = request(address, "POST", "/tokenize", {"messages": messages}).json()
    back = request(address, "POST", "/detokenize", {"tokens": chat["tokens"]}).json()
    assert back == {"prompt": "<|start|>user\nx<|end|><|start|>assistant\n"}
