from __future__ import annotations

from pathlib import Path

import pytest

from twinfire.cli.byte_size import parse_byte_size
from twinfire.cli.config_file import set_defaults_from_file
from twinfire.cli.main import build_parser, main
from twinfire.cli.serve_options import ServeOptions, serve_options
from twinfire.protocol.errors import TwinfireError


def parse(*argv: str) -> ServeOptions:
    parser = build_parser()
    args = parser.parse_args(["serve", *argv])
    if args.config is not None:
        set_defaults_from_file(args.parser, Path(args.config))
        args = parser.parse_args(["serve", *argv])
    return serve_options(args)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "serve.toml"
    path.write_text(
        'model = "/models/a"\nport = 9000\nkv-cache-memory = "2GiB"\nmax_model_len = 512\n'
        'served-model-name = ["a", "b"]\nno-prefix-caching = true\ndtype = "bfloat16"\n'
    )
    return path


def test_defaults() -> None:
    options = parse()
    assert (options.model, options.host, options.port) == ("smollm2-135m", "127.0.0.1", 8000)
    assert options.enable_prefix_caching
    assert options.kv_cache_bytes is None
    assert options.speculate == "off"


def test_how_tokens_are_guessed_ahead_is_checked_when_it_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert parse("--speculate", "suffix:max_drafts=8").speculate == "suffix:max_drafts=8"
    with pytest.raises(SystemExit):
        parse("--speculate", "suffix:max_drafts=0")
    assert "max_drafts is '0'; it must be a number from 1 to 64" in capsys.readouterr().err


def test_the_file_sets_options_and_the_command_line_wins(config_file: Path) -> None:
    from_file = parse("--config", str(config_file))
    assert (from_file.model, from_file.port, from_file.max_model_len) == ("/models/a", 9000, 512)
    assert from_file.kv_cache_bytes == 2 << 30
    assert from_file.served_model_names == ("a", "b")
    assert from_file.dtype == "bf16"
    assert not from_file.enable_prefix_caching
    both = parse("other", "--config", str(config_file), "--port", "1", "--max-model-len", "7")
    assert (both.model, both.port, both.max_model_len) == ("other", 1, 7)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("porrt = 1", "unknown option 'porrt'"),
        ("port = 70000", "port: 70000 is not between"),
        ('port = "x"', "port"),
        ("no-prefix-caching = 3", "must be true or false"),
        ('dtype = "int3"', "must be one of"),
        ('speculate = "ngram:head=x"', "ngram has no option 'head'"),
        ("port = [1]", "must be a plain value"),
        ("[serve]\nport = 1", "unknown option 'serve'"),
        ("port = ", "not valid TOML"),
        ('run = "x"', "unknown option"),
        ('kv-cache-memory = "lots"', "'lots' is not a size"),
    ],
)
def test_a_wrong_file_is_named_with_the_option(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(TwinfireError, match=message) as error:
        parse("--config", str(path))
    assert str(path) in str(error.value)


def test_a_missing_file_is_one_line_and_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--config", "/nowhere/x.toml"]) == 1
    assert capsys.readouterr().err == (
        "twinfire: cannot read /nowhere/x.toml: No such file or directory\n"
    )


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("1048576", 1 << 20),
        ("512MiB", 512 << 20),
        ("2G", 2 * 10**9),
        ("1.5 GB", 1_500_000_000),
        ("3kib", 3072),
    ],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_byte_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1XB", "1e9", "nan"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_byte_size(text)
