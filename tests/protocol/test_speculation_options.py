"""The text of `--speculate`: what it sets, and faults that name option and limit."""

from __future__ import annotations

import pytest

from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.speculation import SpeculationOptions, parse_speculation
from twinfire.protocol.worker_config import (
    WorkerConfig,
    decode_worker_config,
    encode_worker_config,
)


def test_methods_bring_their_defaults() -> None:
    assert parse_speculation("off") == SpeculationOptions()
    assert parse_speculation("suffix") == SpeculationOptions(method="suffix")
    assert parse_speculation("ngram").min_match == 2
    assert parse_speculation("eagle3").max_drafts == 4
    hybrid = parse_speculation("hybrid")
    assert (hybrid.max_drafts, hybrid.head_drafts, hybrid.head) == (16, 4, None)


def test_options_replace_the_defaults() -> None:
    options = parse_speculation(
        "hybrid: max_drafts=32, head=/heads/a=b:c ,tree_tokens=0,adaptive=off,min_match=3"
    )
    assert options == SpeculationOptions(
        method="hybrid",
        max_drafts=32,
        head="/heads/a=b:c",
        tree_tokens=0,
        adaptive=False,
        min_match=3,
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is no method; it must be one of off, ngram, suffix, eagle3, hybrid"),
        ("medusa", "'medusa' is no method"),
        ("off:max_drafts=2", "off has no option 'max_drafts'; it has none"),
        ("ngram:head=x", "ngram has no option 'head'; it has max_drafts, min_match"),
        ("suffix:max_drafts=0", "max_drafts is '0'; it must be a number from 1 to 64"),
        ("suffix:max_drafts=65", "max_drafts is '65'"),
        ("suffix:max_drafts=-3", "max_drafts is '-3'"),
        ("suffix:max_drafts=²", "max_drafts is '²'"),
        ("suffix:max_drafts", "'max_drafts' is not key=value"),
        ("suffix:", "'' is not key=value"),
        ("suffix:head", "'head' is not key=value"),
        ("eagle3:head=", "'head=' is not key=value"),
        ("suffix:max_drafts=1,max_drafts=2", "max_drafts is given twice"),
        ("suffix:adaptive=maybe", "adaptive is 'maybe'; it must be true or false"),
        ("ngram:min_match=9", "min_match 9 is above max_match 8"),
        ("suffix:min_match=3,tree_depth=2", "min_match 3 is above tree_depth 2"),
        ("suffix:tree_tokens=99999999999", "tree_tokens is '99999999999'"),
    ],
)
def test_a_fault_names_option_and_limit(text: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as fault:
        parse_speculation(text)
    assert message in str(fault.value)
    assert fault.value.param == "speculate"


def test_a_worker_is_told_on_its_command_line() -> None:
    config = WorkerConfig(model_path="m", served_name="m", socket_path="", speculate="ngram")
    assert decode_worker_config(encode_worker_config(config)).speculate == "ngram"
