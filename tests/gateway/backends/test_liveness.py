"""When a worker is given up."""

from __future__ import annotations

from twinfire.gateway.backends.liveness import Liveness, LivenessLimits


def problem(liveness: Liveness, now_s: float, step: int) -> str | None:
    return liveness.problem(
        now_s, was_heard=True, step=step, has_work=True, limits=LivenessLimits()
    )


def test_a_step_of_half_a_minute_is_no_fault() -> None:
    # 1,024 prompt tokens on two cores that were shared with thirty processes took 17 s.
    liveness = Liveness(0.0, step=7)
    assert problem(liveness, 30.0, step=7) is None
    assert problem(liveness, 31.0, step=8) is None
    assert problem(liveness, 61.0, step=8) is None


def test_an_engine_that_stands_still_is_given_up_in_the_end() -> None:
    liveness = Liveness(0.0, step=7)
    assert "stood still" in (problem(liveness, 120.0, step=7) or "")
