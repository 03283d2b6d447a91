"""Requests of every kind to a tiny model, served by one engine or two, and what must be alike."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from support.engines import Answer, Collected, Collector
from support.two_engines import GATEWAY, TwoEngines
from twinfire.engine.engine import Engine
from twinfire.protocol.sampling import SamplingParams

VOCAB = 131

Asked = tuple[list[int], SamplingParams]


def asked() -> list[Asked]:
    """Requests of every kind, each prompt a phrase that comes back."""

    def prompt(seed: int, length: int) -> list[int]:
        phrase = np.random.default_rng(seed).integers(0, VOCAB, 9).tolist()
        return (phrase * (length // len(phrase) + 1))[:length]

    def params(**fields: object) -> SamplingParams:
        fields = {"max_tokens": 24, "seed": 11, "temperature": 0.0, "logprobs": 3, **fields}
        return SamplingParams(**fields)  # type: ignore[arg-type]

    return [
        (prompt(1, 70), params()),
        (prompt(2, 33), params(n=2, temperature=0.8, top_p=0.95)),
        (prompt(3, 64), params(frequency_penalty=0.7, presence_penalty=0.2)),
        (prompt(4, 50), params(temperature=0.8, repetition_penalty=1.1, min_tokens=5)),
        (prompt(5, 95), params(stop_token_ids=tuple(range(0, VOCAB, 9)), min_tokens=9)),
        (prompt(6, 1), params(n=3, temperature=0.8, logprobs=-1)),
        (prompt(7, 40), params(prompt_logprobs=2, bad_words=((5, 6), (7,)))),
    ]


def one_by_one(engine: Engine, requests: Sequence[Asked]) -> list[Collected]:
    """Serve each request alone and return what was said."""
    collector = Collector(engine)
    for index, (prompt, params) in enumerate(requests):
        collector.submit(index, prompt, params)
        collector.run()
    return [collector.record(GATEWAY, index) for index in range(len(requests))]


def said(answer: Answer) -> tuple[object, ...]:
    rows = answer.logprobs
    names = ("token_logprobs", "ranks", "top_ids", "top_logprobs")
    joined = tuple(b"".join(getattr(row, name) for row in rows) for name in names)
    return answer.tokens, answer.finish_reason, answer.stop_token_id, joined


def assert_same(got: Collected, expected: Collected) -> None:
    assert {choice: said(one) for choice, one in got.answers.items()} == {
        choice: said(one) for choice, one in expected.answers.items()
    }
    assert got.prompt_logprobs == expected.prompt_logprobs


def handed_over(pair: TwoEngines, requests: Sequence[Asked], first_id: int = 0) -> list[Collected]:
    """Serve all at once, as far as there is room, and return what the gateway heard."""
    waiting = list(enumerate(requests, first_id))
    for _ in range(5000):
        while waiting and pair.submit(waiting[0][0], *waiting[0][1]):
            waiting.pop(0)
        if not (waiting or pair.transfers or pair.decode.has_work or pair.prefill.has_work):
            break
        pair.step()
    pair.run()
    return [pair.collector.record(GATEWAY, first_id + index) for index in range(len(requests))]
