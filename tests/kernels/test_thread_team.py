"""Every tile runs once, whatever the number of threads, and nobody waits for ever."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from twinfire.kernels.cpu._native import ThreadTeam


@pytest.mark.parametrize("num_threads", [1, 2, 4])
@pytest.mark.parametrize("tiles_per_phase", [1, 3, 100])
def test_every_tile_runs_once(num_threads: int, tiles_per_phase: int) -> None:
    team = ThreadTeam(num_threads)
    assert team.num_threads == num_threads
    for num_phases in (1, 7, 500, 2):
        _, tiles = team.measure_phases(num_phases, tiles_per_phase)
        assert tiles == num_phases * tiles_per_phase


def test_more_threads_than_cores_that_never_spin_finish() -> None:
    team = ThreadTeam(4, spin_us=0)
    for _ in range(30):
        assert team.measure_phases(200, 5)[1] == 1000


def test_several_busy_teams_finish() -> None:
    counts: list[int] = []

    def drive() -> None:
        team = ThreadTeam(4, spin_us=20)
        counts.append(sum(team.measure_phases(100, 9)[1] for _ in range(30)))

    drivers = [threading.Thread(target=drive) for _ in range(3)]
    for driver in drivers:
        driver.start()
    for driver in drivers:
        driver.join()
    assert counts == [100 * 9 * 30] * 3


def test_a_team_that_never_ran_ends() -> None:
    for _ in range(20):
        ThreadTeam(3)


def test_reading_memory_takes_time_and_whole_lines() -> None:
    team = ThreadTeam(2)
    assert team.measure_read(np.ones(3 << 20, np.uint8)) > 0
    with pytest.raises(ValueError, match="256"):
        team.measure_read(np.ones(100, np.uint8))


@pytest.mark.parametrize("num_threads", [0, -1])
def test_a_team_needs_a_thread(num_threads: int) -> None:
    with pytest.raises(ValueError, match="at least one thread"):
        ThreadTeam(num_threads)
