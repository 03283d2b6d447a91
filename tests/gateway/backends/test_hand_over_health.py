from __future__ import annotations

from support.routing_workers import ManualClock
from twinfire.gateway.backends.hand_over_health import PAUSE_S, HandOverHealth


def test_a_pair_is_left_alone_after_failures_in_a_row_and_tried_by_one() -> None:
    clock = ManualClock()
    health = HandOverHealth(clock)
    health.failed("p", "d")
    health.succeeded("p", "d")
    health.failed("p", "d")
    assert health.may_try("p", "d")
    health.failed("p", "d")
    assert not health.may_try("p", "d")
    assert health.may_try("p", "other")
    clock.now_s += PAUSE_S
    assert health.may_try("p", "d")
    assert not health.may_try("p", "d")
    health.succeeded("p", "d")
    assert health.may_try("p", "d")
