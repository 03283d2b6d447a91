"""`prediction` and drafts over `twinfire serve` with the default model: sooner, and the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from openai import OpenAI

from support.serve_process import ServeProcess, serve_process

pytestmark = pytest.mark.slow

PHRASE = "one two three four five six seven eight nine ten"
MESSAGES = [{"role": "user", "content": f"Repeat three times: {PHRASE}"}]


def asked(server: ServeProcess, **fields: object) -> tuple[object, ...]:
    """What is said, output tokens, accepted ones and rejected ones."""
    with OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(  # type: ignore[call-overload]
            model="smollm2-135m",
            messages=MESSAGES,
            max_tokens=48,
            seed=7,
            logprobs=True,
            **fields,
        )
    details = answer.usage.completion_tokens_details
    choice = answer.choices[0]
    said = (choice.message.content, choice.finish_reason, choice.logprobs.content)
    return (
        said,
        answer.usage.completion_tokens,
        details.accepted_prediction_tokens,
        details.rejected_prediction_tokens,
    )


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_a_prediction_is_accepted_and_changes_nothing(tmp_path: Path, method: str) -> None:
    sampled = ({"temperature": 0}, {"temperature": 0.8}, {"temperature": 0, "stop": "five six"})
    options = ("--max-model-len", "512")
    with serve_process(tmp_path, *options) as server:
        plain = [asked(server, **fields) for fields in sampled]
    assert [one[2:] for one in plain] == [(0, 0)] * 3
    with serve_process(tmp_path, *options, "--speculate", f"{method}:adaptive=false") as server:
        # What is cut off by a stop string was predicted whole.
        for before, whole, fields in zip(
            plain, (plain[0], plain[1], plain[0]), sampled, strict=True
        ):
            (content, _, _), num_tokens = whole[0], before[1]
            prediction = {"type": "content", "content": content}
            said, num_now, accepted, _ = asked(server, **fields, prediction=prediction)
            assert (said, num_now) == before[:2]
            assert isinstance(accepted, int)
            assert isinstance(num_tokens, int)
            assert num_tokens // 2 <= accepted <= num_tokens
        _, body = server.get("/metrics")
    text = body.decode()
    assert "twinfire:spec_decode_num_accepted_tokens_per_pos_total{model_name=" in text
    assert 'position="0"' in text
