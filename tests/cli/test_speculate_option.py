"""--speculate of the commands that start workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from twinfire.cli.main import build_parser
from twinfire.cli.up_command import _with_options
from twinfire.cluster.cluster_file import ClusterFile, read_cluster_file


def up(*argv: str, cluster: ClusterFile) -> list[str]:
    told = _with_options(cluster, build_parser().parse_args(["up", *argv]))
    return [model.speculate for model in told.models]


def test_up_takes_it_from_the_file_unless_the_command_line_says_other(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(
        "[[model]]\nmodel = 'a'\nspeculate = 'suffix'\n[[model]]\nmodel = 'b'\n"
        "[[model]]\nnames = ['x']\nexternal = { engine = 'vllm', mixed = ['http://h'] }"
    )
    cluster = read_cluster_file(path)
    assert up(cluster=cluster) == ["suffix", "off"]
    assert up("--speculate", "ngram:min_match=3", cluster=cluster) == ["ngram:min_match=3"] * 2
    assert up("--speculate", "off", cluster=ClusterFile()) == ["off"]


@pytest.mark.parametrize("command", [["serve"], ["up"], ["worker", "--join", "unix:/g"]])
def test_every_command_checks_it_at_once(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    parser = build_parser()
    assert parser.parse_args([*command, "--speculate", "hybrid"]).speculate == "hybrid"
    with pytest.raises(SystemExit):
        parser.parse_args([*command, "--speculate", "eagle3:min_match=2"])
    assert "eagle3 has no option 'min_match'" in capsys.readouterr().err
