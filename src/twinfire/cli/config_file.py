"""Options from a TOML file: the same names as on the command line, which wins over the file."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Sequence
from pathlib import Path

from twinfire.protocol.errors import TwinfireError


def parse_with_config(
    parser: argparse.ArgumentParser, args: argparse.Namespace, argv: Sequence[str]
) -> argparse.Namespace:
    """Return `args` with what `args.config` adds.

    `parser` is the sub-command's own and `argv` its own arguments. TwinfireError names the file and
    the option that is unknown or wrong.
    """
    if args.config is None:
        return args
    options = _read(Path(args.config))
    from_file: list[str] = []
    actions = {option: action for action in parser._actions for option in action.option_strings}
    model = options.pop("model", None)
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        action = actions.get(option)
        if action is None or option in ("--config", "--help"):
            known = ", ".join(sorted(key[2:] for key in actions if key.startswith("--")))
            raise TwinfireError(f"{args.config}: unknown option {name!r}; known are {known}")
        from_file += _as_arguments(args.config, option, action, value)
    # The command line comes last, so that it wins.
    merged = parser.parse_args([*from_file, *argv])
    if model is not None and args.model is None:
        merged.model = str(model)
    return merged


def _read(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise TwinfireError(f"cannot read {path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise TwinfireError(f"{path} is not valid TOML: {error}") from None


def _as_arguments(path: str, option: str, action: argparse.Action, value: object) -> list[str]:
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise TwinfireError(f"{path}: {option[2:]} must be true or false")
        return [option] if value else []
    if isinstance(value, list):
        return [part for item in value for part in (option, str(item))]
    if isinstance(value, dict):
        raise TwinfireError(f"{path}: {option[2:]} must be a plain value")
    return [option, str(value)]
