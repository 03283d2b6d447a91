"""Workers, gateways and clients lost in every state: whole answers, nothing held, others unharmed.

Every cell asserts that its fault point was reached. The default tests have a core of the matrix.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support.chaos_cell import LOSSES, Loss
from support.chaos_site import Transport
from twinfire.transfer.fault_points import FAULT_POINTS

TRANSPORTS: tuple[Transport, ...] = ("unix", "tcp", "nixl")

CORE: list[tuple[Transport, str, Loss]] = [
    ("tcp", "sender.chunk_ready", "kill"),
    ("tcp", "receiver.before_adopt", "kill"),
    ("tcp", "decode.step", "kill"),
    ("tcp", "receiver.commit", "cut"),
    ("tcp", "sender.before_commit", "stop"),
]


@pytest.mark.parametrize(("transport", "point", "loss"), CORE)
def test_a_lost_worker_changes_no_answer(
    run_cell: Callable[..., None], transport: Transport, point: str, loss: Loss
) -> None:
    run_cell(transport, lambda cell: cell.lose_worker(point, loss))


def test_a_killed_gateway_harms_no_other(run_cell: Callable[..., None]) -> None:
    run_cell("tcp", lambda cell: cell.lose_gateway("receiver.reading", "kill"))


def test_a_client_that_leaves_frees_what_was_its(run_cell: Callable[..., None]) -> None:
    run_cell("tcp", lambda cell: cell.lose_client("sender.chunk_ready"))


@pytest.mark.slow
@pytest.mark.parametrize("point", FAULT_POINTS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_worker_lost_at_every_point(
    run_cell: Callable[..., None], transport: Transport, loss: Loss, point: str
) -> None:
    run_cell(transport, lambda cell: cell.lose_worker(point, loss))


@pytest.mark.slow
@pytest.mark.parametrize("point", FAULT_POINTS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_gateway_lost_at_every_point(
    run_cell: Callable[..., None], transport: Transport, loss: Loss, point: str
) -> None:
    run_cell(transport, lambda cell: cell.lose_gateway(point, loss))


@pytest.mark.slow
@pytest.mark.parametrize("point", FAULT_POINTS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_client_that_leaves_at_every_point(
    run_cell: Callable[..., None], transport: Transport, point: str
) -> None:
    run_cell(transport, lambda cell: cell.lose_client(point))
