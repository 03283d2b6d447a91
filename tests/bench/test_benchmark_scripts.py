import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_load_metrics import record

from support import tiny_server
from twinfire.bench.request import user_request
from twinfire.bench.request_record import Recorder
from twinfire.bench.stream_events import Finished, StreamFault, TextDelta, TokenIds, Usage

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def server_words(port, *more):
    return f"{sys.executable} {tiny_server.__file__} --port {port} {' '.join(more)}"


def compare(tmp_path, *words):
    command = [sys.executable, str(BENCHMARKS / "compare_peers.py"), *words]
    command += ["--out", str(tmp_path / "result")]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_two_servers_are_compared_run_by_run(tmp_path, unused_port):
    config = tmp_path / "peers.toml"
    config.write_text(
        f'[[server]]\nname = "ours"\ncommand = "{server_words(unused_port)}"\n'
        f'version_command = "{sys.executable} --version"\n'
        "[scenario.single]\nnum_requests = 2\ninput_tokens = 20\noutput_tokens = 4\n"
    )
    peer = f"peer={server_words(unused_port, '--memory-mb', '64')}"
    # The machine is not idle while tests run: any share of foreign work is accepted.
    words = ("--config", str(config), "--server", peer, "--runs", "2", "--max-foreign-cpu", "1")
    done = compare(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert [run["server"] for run in result["runs"]] == ["ours", "peer"] * 2
    assert [run["index"] for run in result["runs"]] == [0, 0, 1, 1]
    assert result["servers"][0]["version"].startswith("Python 3")
    assert result["runs"][0]["phases"]["single"]["completed"] == 2
    table = (tmp_path / "result.md").read_text()
    assert "|  | ours | peer | peer / ours |" in table
    assert "| TTFT P50 ms |" in table
    assert "| peak RSS MB |" in table
    assert "num_requests 2" in table


def test_a_disturbed_comparison_gives_no_result(tmp_path, unused_port):
    words = server_words(unused_port)
    # No machine is quieter than this limit.
    limit = ("--max-foreign-cpu", "-1")
    done = compare(tmp_path, "--server", f"a={words}", "--server", f"b={words}", *limit)
    assert done.returncode == 1
    assert "other processes take" in done.stderr
    assert not (tmp_path / "result.json").exists()


@pytest.mark.parametrize("words", [(), ("--server", "a=x"), ("--server", "nameless")])
def test_two_named_servers_are_needed(tmp_path, words):
    done = compare(tmp_path, *words)
    assert done.returncode == 2
    assert "usage" in done.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[[server]]\nname = 'a'\n", "command"),
        ("[scenario.single]\nnonsense = 1\n", "nonsense"),
        ("[scenario.nonsense]\n", "there are single"),
        ("[[server]\n", "--config"),
    ],
)
def test_a_wrong_file_is_explained(tmp_path, content, message):
    config = tmp_path / "peers.toml"
    config.write_text(content)
    done = compare(tmp_path, "--config", str(config), "--server", "a=x", "--server", "b=y")
    assert done.returncode == 2
    assert message in done.stderr


def test_a_median_needs_a_value_in_every_run(scripts):
    from comparison import _cells

    assert _cells([[1.0, 3.0, 2.0], [4.0, 4.0, 5.0]]) == ["2", "4", "2.00"]
    assert _cells([[1.0, 3.0], [4.0, None]]) == ["2", "-", "-"]
    assert _cells([[None, 1.0], [4.0, 4.0]]) == ["-", "4", "-"]
    assert _cells([[0.0], [4.0]]) == ["0", "4", "-"]


def answer(*, ids, usage, finish="length", max_tokens=4):
    recorder = Recorder(user_request("x", max_tokens), 0.0)
    recorder.add(TextDelta("t"), 1.0)
    recorder.add(TokenIds(ids), 1.0)
    if finish:
        recorder.add(Finished(finish), 1.0)
    if usage is not None:
        recorder.add(Usage(5, usage), 1.0)
    return recorder.finish(1.0)


def test_the_soak_finds_incomplete_answers(scripts):
    from soak_load import problems_of

    assert problems_of(answer(ids=4, usage=4)) == []
    assert problems_of(answer(ids=2, usage=2, finish="stop")) == []
    assert problems_of(answer(ids=3, usage=4)) == ["usage 4, received 3 ids"]
    assert problems_of(answer(ids=3, usage=3)) == ["length after 3 of 4 tokens"]
    assert problems_of(answer(ids=4, usage=None)) == ["no usage"]
    assert problems_of(answer(ids=4, usage=4, finish=None)) == ["finish_reason None"]
    broken = record(0.0, [1.0], fault=StreamFault("dropped", "gone"))
    assert problems_of(broken) == ["dropped: gone"]
