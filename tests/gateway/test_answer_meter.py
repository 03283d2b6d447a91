"""The counts of an external answer: by its usage, else by what came; never more than it says."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from twinfire.gateway.external.answer_meter import AnswerMeter


def read(meter: AnswerMeter, **answer: object) -> None:
    meter.read({name: Raw(msgspec.json.encode(value)) for name, value in answer.items()})


def chunk(index: int = 0, finish: str | None = None) -> dict[str, object]:
    return {"index": index, "delta": {"content": "x"}, "finish_reason": finish}


def test_without_a_usage_what_came_counts() -> None:
    meter = AnswerMeter(40)
    assert meter.billed_counts == (0, 0, 0, 0), "nothing has come, so nothing is known of a prompt"
    read(meter, choices=[chunk(0), chunk(1)])
    read(meter, choices=[chunk(1, "stop")])
    assert meter.billed_counts == (40, 0, 3, 0)
    assert (meter.num_finished, meter.finish_reasons) == (1, {"stop"})
    read(meter, choices=[chunk(0, "length")], usage={"prompt_tokens": 9, "completion_tokens": 2})
    assert meter.billed_counts == (9, 0, 2, 0)
    assert meter.num_billed_tokens == 11
    assert (meter.num_finished, meter.finish_reasons) == (2, {"stop", "length"})


def test_choices_that_tell_their_own_count_are_added_up() -> None:
    meter = AnswerMeter(40)
    for index, count in ((0, 1), (1, 1), (0, 2), (0, 3)):
        usage = {"prompt_tokens": 9, "completion_tokens": count}
        read(meter, choices=[chunk(index)], usage=usage)
    assert meter.billed_counts == (9, 0, 4, 0)
    read(meter, choices=[], usage={"prompt_tokens": 9, "completion_tokens": 5})
    assert meter.billed_counts == (9, 0, 5, 0)


@pytest.mark.parametrize(
    "usage",
    [None, 7, [], {}, {"prompt_tokens": -1}, {"prompt_tokens": "9"}, {"prompt_tokens": 2**40}],
)
def test_a_usage_that_makes_no_sense_is_none(usage: object) -> None:
    meter = AnswerMeter(40)
    read(meter, choices=[chunk()], usage=usage)
    assert meter.billed_counts == (40, 0, 1, 0)


@given(
    prompt=st.integers(0, 1000),
    output=st.none() | st.integers(0, 1000),
    cached=st.none() | st.integers(0, 2000),
    reasoning=st.none() | st.integers(0, 2000),
    split=st.none() | st.integers(0, 2000),
    is_split=st.booleans(),
)
def test_parts_never_exceed_the_whole(
    prompt: int,
    output: int | None,
    cached: int | None,
    reasoning: int | None,
    split: int | None,
    is_split: bool,
) -> None:
    meter = AnswerMeter(1, is_split=is_split)
    meter.split_cached_tokens = split
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }
    read(meter, usage=usage)
    told = split if is_split else cached
    expected = min(told or 0, prompt)
    assert meter.billed_counts == (
        *(prompt, expected, output or 0),
        min(reasoning or 0, output or 0),
    )
