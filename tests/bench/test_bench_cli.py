import argparse
import asyncio
import json
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from support import tiny_server
from support.openai_server import Behaviour, fake_server
from twinfire.bench.load_report import read_json
from twinfire.bench.parameters import Agent, Concurrent, RateSweep, TraceReplay
from twinfire.cli import bench_command
from twinfire.cli.bench_options import load_scenarios, load_target
from twinfire.protocol.errors import TwinfireError


def parsed(*words):
    parser = argparse.ArgumentParser()
    bench_command.add_parser(parser.add_subparsers())
    return parser.parse_args(["bench", *words])


@contextmanager
def server_in_a_thread(behaviour=None):
    """The command runs its own event loop, so the server needs another thread's."""
    ready, box = threading.Event(), []

    async def serve():
        async with fake_server(behaviour) as server:
            stop = asyncio.Event()
            box.extend([server, asyncio.get_running_loop(), stop])
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    ready.wait(30)
    server, loop, stop = box
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


def test_common_options_stand_before_or_after_the_scenario():
    before = parsed("load", "http://h", "--seed", "5", "--api", "completions", "single")
    after = parsed("load", "http://h", "single", "--seed", "5", "--api", "completions")
    assert vars(before) == vars(after)
    assert (before.seed, before.api, before.warmup) == (5, "completions", 1)


def test_each_scenario_gets_its_parameters():
    args = parsed("load", "http://h", "concurrent", "--concurrency", "3", "--input-tokens", "9")
    assert load_scenarios(args) == [Concurrent(concurrency=3, input_tokens=9)]
    args = parsed("load", "http://h", "agent", "--think", "0", "--no-send-session")
    assert load_scenarios(args) == [Agent(send_session=False)]
    args = parsed("load", "http://h", "rate", "--rates", "1", "2.5")
    assert load_scenarios(args) == [RateSweep((1.0, 2.5))]
    args = parsed("load", "http://h", "trace", "t.csv", "--time-scale", "0.1")
    assert load_scenarios(args) == [TraceReplay(Path("t.csv"), time_scale=0.1)]
    assert [s.name for s in load_scenarios(parsed("load", "http://h"))] == ["single", "concurrent"]


@pytest.mark.parametrize(
    "words",
    [
        ("single", "--streams", "3"),
        ("concurrent", "--concurrency", "0"),
        ("concurrent", "--input-tokens", "many"),
        ("rate", "--rates", "0"),
        ("rate", "--rates", "nan"),
        ("trace",),
        ("--extra-body", "[1]"),
        ("nonsense",),
    ],
)
def test_wrong_options_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        parsed("load", "http://h", *words)
    assert "usage:" in capsys.readouterr().err


def test_the_target_comes_from_the_options(tmp_path):
    key = tmp_path / "key"
    key.write_text("k-1\n")
    args = parsed("load", "http://h", "--api-key-file", str(key), "--extra-body", '{"top_k": 3}')
    target = load_target(args)
    assert (target.api_key, target.extra_body, target.model) == ("k-1", {"top_k": 3}, None)
    with pytest.raises(TwinfireError, match="http://"):
        load_target(parsed("load", "localhost:8000"))
    with pytest.raises(TwinfireError, match="missing"):
        load_target(parsed("load", "http://h", "--api-key-file", str(tmp_path / "missing")))


def test_a_load_run_writes_table_json_and_plot(tmp_path, capsys):
    result, plot = tmp_path / "r.json", tmp_path / "r.svg"
    with server_in_a_thread(Behaviour(cached_tokens=0)) as server:
        args = parsed(
            *("load", server.url, "concurrent", "--num-requests", "4", "--concurrency", "2"),
            *("--input-tokens", "30", "--output-tokens", "5", "--slo-ttft-ms", "60000"),
            *("--json", str(result), "--plot", str(plot)),
        )
        assert args.run(args) == 0
    shown = capsys.readouterr().out
    assert "TTFT" in shown
    report = read_json(result)
    assert report.phases[0].metrics.goodput_share == 1.0
    assert report.parameters["concurrency"] == 2
    assert "<svg" in plot.read_text()


def test_several_scenarios_write_several_files(tmp_path):
    with server_in_a_thread() as server:
        args = parsed("load", server.url, "--json", str(tmp_path / "r.json"))
        assert args.run(args) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"r-single.json", "r-concurrent.json"}


def test_failed_requests_fail_the_command(capsys):
    calls = iter(range(1000))

    def later_fail():
        # One request calibrates, one warms up.
        behaviour.status = 200 if next(calls) < 2 else 500

    behaviour = Behaviour(on_request=later_fail)
    with server_in_a_thread(behaviour) as server:
        args = parsed("load", server.url, "single", "--num-requests", "2", "--input-tokens", "20")
        assert args.run(args) == bench_command.FAILED_STATUS
    assert "http_500 2" in capsys.readouterr().out


def test_startup_of_a_command_after_two_dashes(tmp_path, unused_port, capsys):
    result = tmp_path / "s.json"
    command = [sys.executable, tiny_server.__file__, "--port", str(unused_port)]
    args = parsed("startup", "--runs", "1", "--json", str(result), "--", *command)
    assert args.command == command
    assert args.run(args) == 0
    assert "first token s" in capsys.readouterr().out
    assert json.loads(result.read_text())["median"]["ready_s"] > 0


def test_startup_needs_a_run():
    args = parsed("startup", "--runs", "0", "--", "x")
    with pytest.raises(TwinfireError, match="at least 1"):
        args.run(args)
