"""Slow and full workers, prompts that fit nowhere, sessions that meet new workers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support.chaos_site import Transport

slow = pytest.mark.slow
TRANSPORTS = ["tcp", pytest.param("unix", marks=slow), pytest.param("nixl", marks=slow)]


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("point", "delay_s"),
    [("sender.chunk_ready", 0.05), ("receiver.reading", 0.1), ("decode.step", 0.05)],
)
def test_a_slow_worker_takes_longer_and_no_more(
    run_cell: Callable[..., None], transport: Transport, point: str, delay_s: float
) -> None:
    run_cell(transport, lambda cell: cell.slow_worker(point, delay_s))


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_full_decode_worker_serves_one_after_the_other(
    run_cell: Callable[..., None], transport: Transport
) -> None:
    run_cell(transport, lambda cell: cell.full_worker())


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_prompt_that_is_too_long_is_told_so(
    run_cell: Callable[..., None], transport: Transport
) -> None:
    run_cell(transport, lambda cell: cell.too_long_prompt())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_session_takes_its_cache_to_new_workers(
    run_cell: Callable[..., None], transport: Transport
) -> None:
    run_cell(transport, lambda cell: cell.session_on_new_workers())
