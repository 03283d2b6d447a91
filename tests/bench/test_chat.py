import argparse
import asyncio
import io
import json
import os
import pty
import signal
import subprocess
import sys

import pytest
from rich.console import Console
from test_bench_cli import server_in_a_thread
from test_load_metrics import record

from support.openai_server import Behaviour
from twinfire.bench.target import Target
from twinfire.cli import chat_command
from twinfire.cli.chat_session import ChatSession, CommandError, Sampling
from twinfire.cli.chat_terminal import ChatTerminal, figures


def piped(url, text, *, each_line=False, session=None):
    out, err = io.StringIO(), io.StringIO()
    session = session or ChatSession(Sampling(max_tokens=3))
    consoles = (
        Console(file=out, soft_wrap=True, highlight=False),
        Console(file=err, soft_wrap=True, highlight=False),
    )
    with ChatTerminal(Target(url), session, *consoles) as terminal:
        status = terminal.answer_pipe(io.StringIO(text), each_line=each_line)
    return status, out.getvalue(), err.getvalue()


def test_a_piped_message_is_answered_on_standard_output_alone():
    with server_in_a_thread(Behaviour(cached_tokens=5)) as server:
        status, out, err = piped(server.url, "first line\nsecond line\n")
        (body,) = server.bodies
    assert (status, out) == (0, " word word word\n")
    assert body["messages"] == [{"role": "user", "content": "first line\nsecond line"}]
    assert "3 tokens" in err
    assert "first after" in err
    assert "5 cached" in err


def test_figures_by_hand():
    # Four tokens in 1.5 s after the first.
    seen = record(1.0, [1.25, 2.0, 2.75], tokens=4, prompt=9)
    assert figures(seen) == "4 tokens · 2.0 tokens/s · first after 250 ms · prompt 9, 4 cached"


def test_piped_lines_are_turns_of_one_conversation():
    session = ChatSession(Sampling(max_tokens=2, temperature=0.5, seed=4), system="be brief")
    with server_in_a_thread() as server:
        status, _, _ = piped(server.url, "one\n\ntwo\n", each_line=True, session=session)
        first, second = server.bodies
        sessions = {headers["x-session-affinity"] for headers in server.headers}
    assert status == 0
    assert len(sessions) == 1
    assert (first["temperature"], first["seed"], first["max_tokens"]) == (0.5, 4, 2)
    assert [m["role"] for m in second["messages"]] == ["system", "user", "assistant", "user"]


def test_a_failed_answer_fails_the_pipe_and_leaves_no_trace():
    session = ChatSession(Sampling())
    with server_in_a_thread(Behaviour(status=500)) as server:
        status, out, err = piped(server.url, "hello", session=session)
    assert (status, out) == (1, "")
    assert "http_500: scripted failure" in err
    assert session.turns == []


def test_reasoning_is_shown_but_not_kept():
    chunks = [
        {"choices": [{"delta": {"reasoning": "hmm"}}]},
        {"choices": [{"delta": {"content": "yes"}, "finish_reason": "stop"}]},
    ]
    raw = [b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks]
    session = ChatSession(Sampling())
    with server_in_a_thread(Behaviour(raw_chunks=raw)) as server:
        _, out, _ = piped(server.url, "really?", session=session)
    assert out == "hmm\nyes\n"
    assert session.turns[-1].content == "yes"


def test_retry_system_and_clear_change_the_history():
    session = ChatSession(Sampling(), system="old")
    with pytest.raises(CommandError, match="/retry"):
        session.retry()
    session.ask("q")
    session.answered("a")
    assert [m.content for m in session.retry().messages] == ["old", "q"]
    session.answered("b")
    assert [m.content for m in session.messages()] == ["old", "q", "b"]
    session.set_system("new")
    assert [m.content for m in session.messages()] == ["new"]


def test_a_conversation_is_saved(tmp_path):
    session = ChatSession(Sampling(), system="s")
    session.ask("q")
    session.answered("a")
    session.save(tmp_path / "c.json")
    saved = json.loads((tmp_path / "c.json").read_text())
    assert saved["messages"][1] == {"role": "user", "content": "q"}
    session.save(tmp_path / "c.md")
    assert "## assistant\n\na\n" in (tmp_path / "c.md").read_text()
    with pytest.raises(CommandError, match="No such file"):
        session.save(tmp_path / "missing" / "c.json")


PROGRAM = """
import argparse, signal, sys
from twinfire.cli import chat_command
# A test run in the background ignores SIGINT, and so would what it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
parser = argparse.ArgumentParser()
chat_command.add_parser(parser.add_subparsers())
args = parser.parse_args(["chat", *sys.argv[1:]])
sys.exit(args.run(args))
"""


class Terminal:
    """A chat in a real pseudo-terminal."""

    def __init__(self, *words):
        self._main, side = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *words],
            stdin=side,
            stdout=side,
            stderr=side,
            start_new_session=True,
            env={**os.environ, "TERM": "dumb", "COLUMNS": "200"},
        )
        os.close(side)
        self.shown = ""

    def wait_for(self, text):
        while text not in self.shown:
            self.shown += os.read(self._main, 4096).decode().replace("\r\n", "\n")
        before, _, self.shown = self.shown.partition(text)
        return before

    def type(self, text):
        os.write(self._main, text.encode())

    def interrupt(self):
        self._process.send_signal(signal.SIGINT)

    def status(self):
        return self._process.wait(30)

    def close(self):
        self._process.kill()
        self._process.wait()
        os.close(self._main)


@pytest.fixture
def terminal_of():
    opened = []

    def open_terminal(*words):
        opened.append(Terminal(*words))
        return opened[-1]

    yield open_terminal
    for terminal in opened:
        terminal.close()


def test_commands_and_fences_in_a_terminal(terminal_of, tmp_path):
    with server_in_a_thread() as server:
        terminal = terminal_of(server.url, "--max-tokens", "2")
        terminal.wait_for("fake · /help lists commands")
        terminal.wait_for("> ")
        terminal.type("/help\n")
        terminal.wait_for("/save FILE")
        terminal.type('"""\nline one\n/line two\n"""\n')
        terminal.wait_for(" word word")
        terminal.wait_for("2 tokens")
        terminal.type("/nonsense\n")
        terminal.wait_for("no such command")
        terminal.type("/retry\n")
        terminal.wait_for("2 tokens")
        path = tmp_path / "c.json"
        terminal.type(f"/save {path}\n")
        terminal.wait_for("saved")
        terminal.type("/quit\n")
        assert terminal.status() == 0
        contents = [body["messages"][-1]["content"] for body in server.bodies]
    assert contents == ["line one\n/line two"] * 2
    assert [m["role"] for m in json.loads(path.read_text())["messages"]] == ["user", "assistant"]


def test_ctrl_c_stops_an_answer_and_keeps_the_chat(terminal_of):
    def gate(number, chunk):
        event = asyncio.Event()
        if number > 0 or chunk < 2:
            event.set()
        return event

    with server_in_a_thread(Behaviour(gate=gate)) as server:
        terminal = terminal_of(server.url, "--max-tokens", "4")
        terminal.wait_for("> ")
        terminal.type("hello\n")
        terminal.wait_for(" word word")
        terminal.interrupt()
        terminal.wait_for("stopped · 2 tokens")
        terminal.type("again\n")
        terminal.wait_for("4 tokens")
        # The end of input counts at a prompt: typed before it, the terminal swallows it.
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.status() == 0
        history = server.bodies[1]["messages"]
    assert [m["content"] for m in history] == ["hello", " word word", "again"]


def test_the_parser_reads_its_options():
    parser = argparse.ArgumentParser()
    chat_command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["chat", "--temperature", "0", "--lines"])
    assert (args.url, args.temperature, args.lines) == (chat_command.DEFAULT_URL, 0.0, True)
