"""A place for a worker whose process ends at once, whenever it is started."""

from __future__ import annotations

import asyncio

import pytest

from twinfire.cluster.worker_slot import WorkerSlot
from twinfire.gateway.backends.worker_child import (
    HEALTHY_AFTER_S,
    RESTART_DELAYS_S,
    RestartDelays,
)
from twinfire.protocol.worker_config import WorkerConfig

# It neither listens nor joins anybody, which the process finds out before it loads anything.
HOPELESS = WorkerConfig(name="w-0", model_path="", served_name="m", socket_path="")


class RecordedDelays(RestartDelays):
    def __init__(self, *delays_s: float) -> None:
        super().__init__(delays_s)
        self.taken_s: list[float] = []

    def after(self, lived_s: float) -> float:
        self.taken_s.append(super().after(lived_s))
        return self.taken_s[-1]


def test_delays_grow_to_the_last_and_begin_anew_after_a_healthy_life() -> None:
    delays = RestartDelays()
    taken = [delays.after(1.0) for _ in range(len(RESTART_DELAYS_S) + 2)]
    assert taken == [*RESTART_DELAYS_S, RESTART_DELAYS_S[-1], RESTART_DELAYS_S[-1]]
    assert delays.after(HEALTHY_AFTER_S + 1) == RESTART_DELAYS_S[0]
    assert delays.after(1.0) == RESTART_DELAYS_S[1]


def test_a_crash_loop_is_slowed_down_and_told(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        delays = RecordedDelays(0.01, 0.02, 60.0)
        slot = WorkerSlot("w-0", HOPELESS, lambda _: True, delays)
        assert slot.next_start_in_s is None
        await slot.start()
        async with asyncio.timeout(60):
            while len(delays.taken_s) < 3:
                await asyncio.sleep(0.01)
        assert (slot.num_restarts, slot.last_exit, slot.failure) == (2, 1, None)
        assert slot.pid is None
        assert slot.next_start_in_s is not None
        assert 0 < slot.next_start_in_s <= 60
        await slot.end()

    asyncio.run(main())
    assert "w-0 exited with status 1; starting again in 60.0 s" in caplog.text


def test_one_that_never_served_is_given_up() -> None:
    async def main() -> None:
        slot = WorkerSlot("w-0", HOPELESS, lambda _: False)
        await slot.start()
        async with asyncio.timeout(60):
            while slot.failure is None:
                await asyncio.sleep(0.01)
        assert slot.failure == "w-0 exited with status 1 before it was ready"
        assert slot.next_start_in_s is None
        await slot.end()

    asyncio.run(main())


def test_one_that_died_as_soon_as_it_served_is_started_again() -> None:
    """Whether it served is asked of its process id, since nothing else is left of it."""
    served: list[int] = []

    async def main() -> None:
        delays = RecordedDelays(0.01, 60.0)
        slot = WorkerSlot("w-0", HOPELESS, lambda pid: served.append(pid) is None, delays)
        await slot.start()
        first_pid = slot.pid
        async with asyncio.timeout(60):
            while slot.num_restarts == 0:
                await asyncio.sleep(0.01)
        assert served[0] == first_pid
        assert slot.failure is None
        await slot.end()

    asyncio.run(main())
