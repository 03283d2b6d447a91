"""`twinfire models` as a user runs it."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from twinfire.artifacts.aliases import DEFAULT_ALIAS
from twinfire.cli import models_command
from twinfire.protocol.errors import ModelError


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    models_command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["models", *arguments])
    status: int = args.run(args)
    return status


@pytest.mark.parametrize("arguments", [(), ("list",)])
def test_list_says_what_is_there_and_what_is_not(
    arguments: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TWINFIRE_CACHE", str(tmp_path))
    assert run(*arguments) == 0
    output = capsys.readouterr().out
    assert DEFAULT_ALIAS in output
    assert "(default)" in output
    assert "not" in output
    assert "downloaded" in output
    assert list(tmp_path.iterdir()) == []


def test_pull_prints_the_path_of_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("pull") == 0
    path = Path(capsys.readouterr().out.strip())
    assert path.is_file()
    assert path.suffix == ".gguf"


def test_pull_of_an_unknown_name_lists_those_known() -> None:
    with pytest.raises(ModelError, match=f"'nonsense'; there are: {DEFAULT_ALIAS}"):
        run("pull", "nonsense")
