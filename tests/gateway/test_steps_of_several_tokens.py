"""With drafts a step brings several tokens; what clients see must not depend on how many."""

from __future__ import annotations

import asyncio
import json
import re
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.byte_tokenizer import END_ID, EOS_ID, ByteTokenizer, plain_template
from support.gateway_server import MODEL, RunningGateway, running_gateway, tiny_config
from support.raw_http import request
from support.scripted_backend import ScriptedBackend, scripted_rows
from twinfire.gateway.backends.generation import LinkGeneration
from twinfire.gateway.metrics import Metrics
from twinfire.gateway.request_meter import RequestMeter
from twinfire.gateway.served_model import TextSide
from twinfire.gateway.settings import GatewaySettings
from twinfire.gateway.text.answer_formats import ParserChoice
from twinfire.gateway.text.answer_parts import ContentText, ReasoningText
from twinfire.gateway.text.answer_splitter import AnswerPlan, AnswerSplitter
from twinfire.gateway.text.choice_text import TextDelta, TextOptions
from twinfire.gateway.text.reasoning import REASONING_FORMATS
from twinfire.gateway.text.stop_strings import StopStrings
from twinfire.gateway.text.vocabulary import Vocabulary
from twinfire.gateway.text_generation import GenerationJob, TextGeneration
from twinfire.protocol.messages import ChoiceDelta, FinishReason, PromptDone
from twinfire.protocol.sampling import SamplingParams
from twinfire.protocol.tokens import pack_ids

VOCABULARY = Vocabulary(ByteTokenizer())
PLAN = AnswerPlan(reasoning=REASONING_FORMATS["think"])
N = 2


class Seen:
    """All that a client sees of one choice, put together."""

    def __init__(self) -> None:
        self.text = ""
        self.tokens: list[object] = []
        self.end: tuple[object, ...] = ()
        self.parts: dict[type, str] = defaultdict(str)
        self._splitter = AnswerSplitter(PLAN)

    def add(self, delta: TextDelta) -> None:
        assert not self.end, "nothing comes after the end"
        self.text += delta.text
        self.tokens += [(token.token_id, token.start, token.logprob) for token in delta.tokens]
        answer = self._splitter.feed(delta)
        for part in answer.parts:
            if isinstance(part, ContentText | ReasoningText):
                self.parts[type(part)] += part.text
        if delta.finish_reason is not None:
            self.end = (
                delta.finish_reason,
                delta.stop_reason,
                delta.num_output_tokens,
                answer.num_reasoning_tokens,
            )

    def as_tuple(self) -> tuple[object, ...]:
        return self.text, self.tokens, self.end, dict(self.parts)


class KeepingSink:
    def __init__(self, choices: list[Seen]) -> None:
        self._choices = choices

    def is_ready(self) -> bool:
        return True

    def take(self, delta: TextDelta) -> None:
        self._choices[delta.index].add(delta)


async def played(
    outputs: Sequence[Sequence[int]],
    sizes: Sequence[int],
    options: TextOptions,
    finish: FinishReason,
) -> tuple[list[tuple[object, ...]], int, set[int]]:
    """What is seen of each choice, output tokens of the request, choices that were cancelled."""
    cancelled: set[int] = set()
    generation = LinkGeneration(N, cancelled.add)
    backend = ScriptedBackend()
    backend.submit = lambda *_, **__: generation  # type: ignore[method-assign]
    sampling = SamplingParams(max_tokens=100, seed=1, n=N)
    job = GenerationJob([array("I", [1, 2])], [sampling], options)
    meter = RequestMeter(Metrics(MODEL), 0.0, [2], N)
    choices = [Seen() for _ in range(N)]
    sink = KeepingSink(choices)

    async def read() -> None:
        async for event in TextGeneration(backend, VOCABULARY, job, meter).events(sink):
            if isinstance(event, TextDelta):
                sink.take(event)

    reading = asyncio.create_task(read())
    await asyncio.sleep(0)
    generation.put(PromptDone(1, 0, 0.0, 0.0))
    await asyncio.sleep(0)
    for choice, output in enumerate(outputs):
        position = step = 0
        while position < len(output):
            end = position + sizes[(step + choice) % len(sizes)]
            tokens = output[position:end]
            reason = finish if end >= len(output) else None
            rows = scripted_rows(tokens, 1) if options.want_tokens else None
            generation.put(ChoiceDelta(1, choice, pack_ids(tokens), reason, None, rows))
            position, step = end, step + 1
    await asyncio.wait_for(reading, 5)
    return [one.as_tuple() for one in choices], meter.num_output_tokens, cancelled


PIECES = st.lists(
    st.sampled_from(
        [
            *(list(text.encode()) for text in ("a", "b", " ", "é", "😀", "<think>", "</think>")),
            [END_ID],
            [0xF0, 0x9F],
            [0xC3],
        ]
    ),
    max_size=12,
)

STOPS = ("a", "b", "ab", "ba", " é", "é", "😀", "k>", "</", "\ufffd", "a a", "bb")


@settings(deadline=None, max_examples=400)
@given(
    outputs=st.lists(PIECES, min_size=N, max_size=N),
    sizes=st.lists(st.integers(1, 8), min_size=1, max_size=6),
    stops=st.lists(st.sampled_from(STOPS), max_size=2),
    include=st.booleans(),
    min_tokens=st.integers(0, 6),
    want_tokens=st.booleans(),
    skip_special=st.booleans(),
    finish=st.sampled_from(["stop", "length"]),
)
def test_one_by_one_and_several_at_once_look_alike(
    outputs: list[list[list[int]]],
    sizes: list[int],
    stops: list[str],
    include: bool,
    min_tokens: int,
    want_tokens: bool,
    skip_special: bool,
    finish: FinishReason,
) -> None:
    tokens = [[*(token for piece in pieces for token in piece), EOS_ID] for pieces in outputs]
    options = TextOptions(
        StopStrings(stops), include, skip_special, frozenset(), min_tokens, want_tokens
    )
    one_by_one, num_tokens, cancelled = asyncio.run(played(tokens, [1], options, finish))
    together, num_together, cancelled_together = asyncio.run(played(tokens, sizes, options, finish))
    assert together == one_by_one
    assert num_together == num_tokens
    # A choice that its worker has ended in the same step needs no cancelling.
    assert cancelled_together <= cancelled


def test_a_stop_inside_a_step_cancels_the_choice_and_counts_up_to_itself() -> None:
    options = TextOptions(StopStrings(["STOP"]), want_tokens=True)
    outputs = [list(b"one STOP and more. " * 2), list(b"two")]
    seen, num_tokens, cancelled = asyncio.run(played(outputs, [6], options, "length"))
    text, tokens, end, _ = seen[0]
    assert (text, len(tokens)) == ("one ", len("one "))  # type: ignore[arg-type]
    assert end == ("stop", "STOP", len("one STOP"), 0)
    assert num_tokens == len("one STOP") + len("two")
    assert cancelled == {0}


def test_a_token_without_text_before_a_stop_of_the_same_step_is_shown() -> None:
    options = TextOptions(StopStrings(["ST"]), want_tokens=True)
    outputs = [[ord("a"), END_ID, ord("S"), ord("T")], [ord("b"), EOS_ID]]
    one_by_one = asyncio.run(played(outputs, [1], options, "length"))
    together = asyncio.run(played(outputs, [4], options, "length"))
    assert together[:2] == one_by_one[:2]
    assert [token[0] for token in together[0][0][1]] == [ord("a"), END_ID]  # type: ignore[index]


THINKING = (
    "<think>The user wants STOP? No.</think>It is warm é😀 there.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'
)
PLAIN = "The quick brown fox — jumps. STOP over the lazy dog."
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
USER = [{"role": "user", "content": "hi"}]
FUNCTION = {"name": "get_weather", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": FUNCTION}]
RUN = "/client/v4/accounts/0123456789abcdef/ai/run/" + MODEL
NO_END = {"ignore_eos": True, "max_tokens": 43}
CASES: dict[str, tuple[str, str, dict[str, object]]] = {
    "chat": ("/v1/chat/completions", PLAIN, {"messages": USER}),
    "chat-stop-logprobs-n": (
        "/v1/chat/completions",
        PLAIN,
        {"messages": USER, "n": 3, "stop": "STOP", "logprobs": True, "top_logprobs": 2},
    ),
    "chat-length": ("/v1/chat/completions", PLAIN, {"messages": USER, **NO_END}),
    "chat-token-ids": (
        "/v1/chat/completions",
        THINKING,
        {"messages": USER, "return_token_ids": True, "logprobs": True},
    ),
    "chat-tools": ("/v1/chat/completions", THINKING, {"messages": USER, "tools": TOOLS}),
    "completions-echo": (
        "/v1/completions",
        PLAIN,
        {"prompt": ["a", "bc"], "n": 2, "echo": True, "logprobs": 2, "max_tokens": 99},
    ),
    "completions-stop": (
        "/v1/completions",
        PLAIN,
        {
            "prompt": "a",
            "stop": [". S", "P o"],
            "min_tokens": 35,
            "include_stop_str_in_output": True,
            "return_token_ids": True,
            "max_tokens": 99,
        },
    ),
    "responses": (
        "/v1/responses",
        THINKING,
        {"input": "hi", "tools": [{"type": "function", **FUNCTION}]},
    ),
    "messages": (
        "/v1/messages",
        THINKING,
        {
            "messages": USER,
            "max_tokens": 300,
            "tools": [{"name": "get_weather", "input_schema": {"type": "object"}}],
        },
    ),
    "messages-stop": (
        "/v1/messages",
        PLAIN,
        {"messages": USER, "max_tokens": 300, "stop_sequences": ["STOP"]},
    ),
    "run": (RUN, THINKING, {"messages": USER, "tools": TOOLS}),
    "run-prompt": (RUN, PLAIN, {"prompt": "hi", "stop": "STOP"}),
}
SHOWN = {
    *("content", "text", "delta", "response", "reasoning_content", "arguments", "partial_json"),
    *("thinking", "finish_reason", "stop_reason", "token_ids", "logprob", "token_logprobs"),
    *("text_offset", "tokens", "bytes", "name", "stop_sequence", "status"),
    *("completion_tokens", "reasoning_tokens", "output_tokens", "thinking_tokens"),
}
CHANGING = re.compile(
    r'"(?:id|call_id|item_id|signature|created|created_at|completed_at)": ?(?:"[^"]*"|[\d.]+)'
)


@pytest.fixture(scope="module")
def own() -> Iterator[RunningGateway]:
    parsers = ParserChoice("hermes", "think")
    text = TextSide.load(ByteTokenizer(), plain_template(TEMPLATE), tiny_config(), parsers)
    with running_gateway(GatewaySettings(), text=text) as gateway:
        yield gateway


def seen_in(events: list[dict[str, Any]]) -> dict[str, object]:
    """All strings and lists of a stream at their places, put together; else the last value."""
    seen: dict[str, Any] = {}

    def add(place: str, name: str, value: Any) -> None:
        if isinstance(value, dict):
            index = value.get("index", value.get("output_index", ""))
            for key, inner in value.items():
                add(f"{place}/{name}{index}", key, inner)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for inner in value:
                add(place, name, inner)
        elif name in SHOWN and isinstance(value, str | list):
            seen[f"{place}/{name}"] = seen.get(f"{place}/{name}", type(value)()) + value
        elif name in SHOWN and value is not None:
            seen.setdefault(f"{place}/{name}", []).append(value)

    for event in events:
        add(str(event.get("type", "")), "", event)
    return {
        place: value
        for place, value in seen.items()
        # Pieces without anything in them may be more or fewer.
        if value
    }


def answered(gateway: RunningGateway, case: str, sizes: Sequence[int], stream: bool) -> object:
    path, script, fields = CASES[case]
    gateway.backend.step_sizes = sizes
    gateway.backend.script = lambda prompt, sampling, choice: list(script.encode())[choice:]
    body: dict[str, object] = {"model": MODEL, "seed": 5, "stream": stream, **fields}
    if stream and path.endswith("completions"):
        body["stream_options"] = {"include_usage": True}
    answer = request(gateway.server.address, "POST", path, body)
    text = answer.body.decode()
    assert answer.status == 200, text
    if not stream:
        return json.loads(CHANGING.sub('"id": 0', text))
    lines = (line.removeprefix("data: ") for line in text.splitlines())
    return seen_in(
        [json.loads(CHANGING.sub('"id": 0', line)) for line in lines if line.startswith("{")]
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_every_dialect_tells_the_same(own: RunningGateway, case: str, stream: bool) -> None:
    one_by_one = answered(own, case, [1], stream)
    for sizes in ([2], [1, 8, 3], [5, 1, 1, 7], [64]):
        assert answered(own, case, sizes, stream) == one_by_one, sizes


def test_intervals_count_every_token(own: RunningGateway) -> None:
    metrics = Metrics(MODEL)
    meter = RequestMeter(metrics, 0.0, [2], 1)
    for num_tokens in (1, 5, 6, 14):
        meter.tokens(0, num_tokens)
    text = metrics.render(None).decode()
    assert 'twinfire:inter_token_latency_seconds_count{model_name="tiny"} 13.0' in text
