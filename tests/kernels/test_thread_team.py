"""Every tile runs once, whatever the number of threads, and nobody waits for ever."""

from __future__ import annotations

import threading
import time
from pathlib import Path

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


def write_load(path: Path, num_runnable: int) -> None:
    path.write_text(f"0.31 0.20 0.18 {num_runnable}/211 4321\n")


def test_borrowers_compute_only_while_no_thread_waits_for_a_core(tmp_path: Path) -> None:
    load = tmp_path / "loadavg"
    write_load(load, 2)
    team = ThreadTeam(2, num_own_threads=1, load_file=str(load))
    assert (team.num_threads, team.num_own_threads) == (2, 1)
    assert all(team.count_tiles(20, 60, 200))
    write_load(load, 3)
    assert team.count_tiles(5, 60, 20) == [300, 0]
    write_load(load, 1)
    assert all(team.count_tiles(20, 60, 200))


def test_of_many_borrowers_half_of_those_too_many_leave_the_last_first(tmp_path: Path) -> None:
    load = tmp_path / "loadavg"
    team = ThreadTeam(6, num_own_threads=1, load_file=str(load))
    # Of six cores; as many teams of its like would leave as are too many.
    for num_runnable, num_left in ((7, 5), (8, 5), (9, 4), (13, 2), (15, 1), (40, 1)):
        write_load(load, num_runnable)
        counts = team.count_tiles(2, 40, 20)
        assert sum(counts) == 80
        assert counts[num_left:] == [0] * (6 - num_left), num_runnable


def test_a_borrower_leaves_in_the_middle_of_a_run(tmp_path: Path) -> None:
    load = tmp_path / "loadavg"
    write_load(load, 1)
    team = ThreadTeam(2, num_own_threads=1, load_file=str(load))
    timer = threading.Timer(0.15, write_load, (load, 9))
    timer.start()
    own, borrowed = team.count_tiles(1000, 2, 500)
    timer.join()
    assert own + borrowed == 2000
    assert 0 < borrowed < own, "it took part, and not to the end"


@pytest.mark.parametrize(
    "content", [None, "", "nonsense", "0.1 0.1 0.1 x/9", "0.00 0.00 0.00 0/0 0"]
)
def test_where_the_system_does_not_tell_nothing_is_borrowed(
    tmp_path: Path, content: str | None
) -> None:
    load = tmp_path / "loadavg"
    if content is not None:
        load.write_text(content)
    team = ThreadTeam(2, num_own_threads=1, load_file=str(load))
    assert team.count_tiles(3, 10, 20) == [30, 0]


def test_borrowers_that_come_and_go_leave_no_tile_undone(tmp_path: Path) -> None:
    load = tmp_path / "loadavg"
    write_load(load, 1)
    team = ThreadTeam(4, num_own_threads=2, load_file=str(load))
    stop = threading.Event()

    def change() -> None:
        while not stop.wait(0.0005):
            write_load(load, 1 if time.monotonic_ns() % 2 else 9)

    changer = threading.Thread(target=change)
    changer.start()
    try:
        for _ in range(50):
            assert sum(team.count_tiles(100, 7, 1)) == 700
    finally:
        stop.set()
        changer.join()


@pytest.mark.parametrize("num_own", [0, -1, 3])
def test_a_team_has_threads_of_its_own(num_own: int) -> None:
    with pytest.raises(ValueError, match="of its own"):
        ThreadTeam(2, num_own_threads=num_own)


@pytest.mark.parametrize("num_threads", [0, -1])
def test_a_team_needs_a_thread(num_threads: int) -> None:
    with pytest.raises(ValueError, match="at least one thread"):
        ThreadTeam(num_threads)
