import asyncio
import os
import socket
import subprocess
import sys
import time

import pytest

from support import tiny_server
from twinfire.bench.machine import ForeignCpu, describe_machine
from twinfire.bench.process_tree import scan_processes, tree_of, tree_pss_bytes, tree_rss_bytes
from twinfire.bench.server_process import ServerFailed, ServerProcess, url_of_command
from twinfire.bench.startup import measure_startup
from twinfire.bench.target import Target


def command(port, *more):
    return [sys.executable, tiny_server.__file__, "--port", str(port), *more]


def startup(command, *, runs=1, timeout_s=60.0):
    seen = []
    report = asyncio.run(
        measure_startup(
            command,
            Target(url_of_command(command)),
            runs=runs,
            timeout_s=timeout_s,
            on_run=seen.append,
        )
    )
    assert seen == report.runs
    return report


def test_the_stages_of_a_start_come_in_order(unused_port):
    report = startup(command(unused_port, "--unready-answers", "3", "--memory-mb", "64"), runs=2)
    for run in report.runs:
        assert 0 < run.port_s <= run.ready_s <= run.first_token_s
        assert run.ttft_s > 0
        assert run.peak_rss_bytes > 64 << 20
    starts = sorted(run.first_token_s for run in report.runs)
    assert report.median.first_token_s == pytest.approx(sum(starts) / 2)


def test_a_command_that_ends_shows_its_output(unused_port):
    with pytest.raises(ServerFailed, match="no such model here"):
        startup(command(unused_port, "--fail", "no such model here"))


def test_a_command_that_does_not_exist_is_named(unused_port):
    with pytest.raises(ServerFailed, match="cannot start nonsense-server"):
        startup(["nonsense-server", "--port", str(unused_port)])


def test_a_server_that_is_never_ready_is_stopped(unused_port):
    with pytest.raises(ServerFailed, match="was not ready within 2 s"):
        startup(command(unused_port, "--unready-answers", "1000000"), timeout_s=2.0)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", unused_port)) != 0


def test_a_taken_port_is_noticed_before_anything_starts(unused_port):
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", unused_port))
        taken.listen()
        with pytest.raises(ServerFailed, match="already"):
            startup(command(unused_port))


def test_stopping_takes_grandchildren_along(unused_port, tmp_path):
    script = (
        f"sleep 1000 & echo $!; exec {sys.executable} {tiny_server.__file__} --port {unused_port}"
    )

    async def run():
        log = tmp_path / "log"
        async with ServerProcess(
            ["sh", "-c", script], f"http://127.0.0.1:{unused_port}", log
        ) as server:
            await server.wait_until_ready(server.started_s + 60)
            sleeper = int(log.read_text().split()[0])
            assert sleeper in {p.pid for p in tree_of(server.pid, scan_processes())}
        return sleeper

    sleeper = asyncio.run(run())
    deadline_s = time.monotonic() + 10
    while any(p.pid == sleeper and p.rss_bytes for p in scan_processes()):
        assert time.monotonic() < deadline_s, "the grandchild lives"


@pytest.mark.parametrize(
    ("words", "url"),
    [
        (["serve", "--port", "81"], "http://127.0.0.1:81"),
        (["serve", "--port=82", "--host", "0.0.0.0"], "http://127.0.0.1:82"),
        (["serve", "--host=::1x"], "http://::1x:8000"),
    ],
)
def test_the_url_is_read_from_the_command(words, url):
    assert url_of_command(words) == url


def test_process_trees_and_memory():
    child = subprocess.Popen(["sleep", "1000"])
    try:
        names = {p.pid: p.name for p in tree_of(os.getpid(), scan_processes())}
        assert child.pid in names
        assert os.getpid() in names
        assert tree_rss_bytes(os.getpid()) > 1 << 20
        pss_bytes = tree_pss_bytes(child.pid)
        assert pss_bytes is None or 0 < pss_bytes <= tree_rss_bytes(child.pid)
    finally:
        child.kill()
        child.wait()


def test_work_of_this_process_is_not_foreign():
    foreign = ForeignCpu()
    until_s = time.process_time() + 0.3
    while time.process_time() < until_s:
        pass
    assert 0.0 <= foreign.share() <= 1.0
    other = subprocess.run(["true"], check=True)
    assert other.returncode == 0
    machine = describe_machine()
    assert machine.cores >= 1
    assert machine.memory_bytes
