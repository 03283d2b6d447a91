"""What drafts came to, where it is shown: metrics, a worker's status, and `twinfire status`."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec
import pytest

from support.scripted_backend import worker_info
from support.scripted_worker import idle_load
from twinfire.cli.cluster_client import show
from twinfire.gateway.cluster_control import ClusterStatus, WorkerStatus, worker_status
from twinfire.gateway.metrics import Metrics
from twinfire.protocol.messages import Load


def load(step: int, drafted: tuple[int, ...] = (), accepted: tuple[int, ...] = ()) -> Load:
    return msgspec.structs.replace(idle_load(step), drafted=drafted, accepted=accepted)


def value(text: str, name: str, labels: str = "") -> float:
    start = f'twinfire:spec_decode_num_{name}_total{{model_name="m"{labels}}} '
    (line,) = (line for line in text.splitlines() if line.startswith(start))
    return float(line.removeprefix(start))


def test_counters_follow_positions_over_workers_and_their_lives() -> None:
    metrics = Metrics("m")
    metrics.observe_load(load(5, (10, 6), (7, 2)), "a")
    metrics.observe_load(load(9, (2,), (1,)), "b")
    first = metrics.render(None).decode()
    assert (value(first, "drafts"), value(first, "draft_tokens")) == (12, 18)
    assert value(first, "accepted_tokens") == 10
    # A draft was longer than any before; the other worker began anew.
    metrics.observe_load(load(6, (11, 7, 1), (8, 3, 1)), "a")
    metrics.observe_load(load(1, (3, 3), (0, 0)), "b")
    text = metrics.render(None).decode()
    assert value(text, "drafts") == 12 + 1 + 3
    assert value(text, "draft_tokens") == 18 + 3 + 6
    assert value(text, "accepted_tokens") == 10 + 3
    by_position = [
        (
            value(text, "draft_tokens_per_pos", f',position="{position}"'),
            value(text, "accepted_tokens_per_pos", f',position="{position}"'),
        )
        for position in range(3)
    ]
    assert by_position == [(16, 9), (10, 3), (1, 1)]
    assert metrics.render(None) == text.encode()


def test_without_speculation_there_is_nothing_to_count() -> None:
    metrics = Metrics("m")
    metrics.observe_load(load(5))
    text = metrics.render(None, with_vllm_names=True).decode()
    assert value(text, "draft_tokens") == 0
    assert "position=" not in text
    assert 'vllm:spec_decode_num_drafts_total{model_name="m"} 0.0' in text


def status_of(report: Load | None) -> WorkerStatus:
    return worker_status(
        worker_info(), report, name="w", model="m", supervised=True, draining=False, restarts=0
    )


@pytest.mark.parametrize(
    ("report", "shown"),
    [
        (load(5, (10, 6, 4), (8, 4, 3)), "75%, 2.5 tokens"),
        (load(5, (0, 0), (0, 0)), "-"),
        (load(5), "-"),
        (None, "-"),
    ],
)
def test_status_tells_how_much_of_the_drafts_is_accepted(
    report: Load | None, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = ClusterStatus((status_of(report),), 0, 0, {})
    answer: dict[str, Any] = msgspec.to_builtins(status)
    show(argparse.Namespace(json=False), answer)
    header, row = capsys.readouterr().out.splitlines()
    column = header.index("drafts")
    assert row[column : header.index("state")].strip() == shown
    assert row[header.index("state") :] == "ready"
