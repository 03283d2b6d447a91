from __future__ import annotations

import pytest

from twinfire.engine.cpus import usable_cores
from twinfire.protocol.worker_config import WorkerConfig
from twinfire.worker.step_tokens import prompt_tokens_beside_streams, step_tokens


def config(**settings: object) -> WorkerConfig:
    return WorkerConfig(model_path="m", served_name="m", socket_path="", **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"threads": 1}, 256),
        ({"threads": 2}, 512),
        ({"threads": 64}, 2048),
        ({"threads": 1, "max_num_seqs": 300}, 300),
        ({"device": "cuda:1", "threads": 1}, 4096),
        ({"threads": 2, "max_num_batched_tokens": 100}, 100),
        ({"max_num_batched_tokens": 32, "max_num_seqs": 64}, 64),
        ({}, min(256 * usable_cores(), 2048)),
    ],
)
def test_a_step_has_what_was_asked_for_or_what_suits_the_machine(
    settings: dict[str, object], expected: int
) -> None:
    assert step_tokens(config(**settings)) == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"role": "decode", "threads": 1}, 64),
        ({"role": "decode", "threads": 4}, 256),
        ({"role": "decode", "threads": 4, "max_prompt_tokens_beside_streams": 32}, 32),
        ({"role": "decode", "device": "cuda"}, None),
        ({"role": "prefill", "threads": 1}, None),
        ({"role": "mixed", "max_prompt_tokens_beside_streams": 100}, 100),
    ],
)
def test_streams_of_decode_workers_do_not_wait_long_for_prompts(
    settings: dict[str, object], expected: int | None
) -> None:
    assert prompt_tokens_beside_streams(config(**settings)) == expected
