"""Options from a TOML file: the same names as on the command line, which wins over the file."""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path

from twinfire.protocol.errors import TwinfireError

_NOT_IN_A_FILE = ("config", "help", "run")


def set_defaults_from_file(parser: argparse.ArgumentParser, path: Path) -> None:
    """Make what the file says the defaults of `parser`, a sub-command's own.

    TwinfireError names the file and the option that is unknown or wrong.
    """
    actions = {
        action.dest: action for action in parser._actions if action.dest not in _NOT_IN_A_FILE
    }
    for name, value in _read(path).items():
        dest = name.replace("-", "_")
        if dest not in actions:
            known = ", ".join(sorted(key.replace("_", "-") for key in actions))
            raise TwinfireError(f"{path}: unknown option {name!r}; known are {known}")
        parser.set_defaults(**{dest: _converted(path, name, actions[dest], value)})


def _read(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise TwinfireError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TwinfireError(f"{path} is not valid TOML: {error}") from None


def _converted(path: Path, name: str, action: argparse.Action, value: object) -> object:
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise TwinfireError(f"{path}: {name} must be true or false, not {value!r}")
        return value
    if isinstance(action.default, list):
        values = value if isinstance(value, list) else [value]
        return [_converted_one(path, name, action, one) for one in values]
    return _converted_one(path, name, action, value)


def _converted_one(path: Path, name: str, action: argparse.Action, value: object) -> object:
    if isinstance(value, bool | list | dict):
        raise TwinfireError(f"{path}: {name} must be a plain value, not {value!r}")
    convert = action.type if callable(action.type) else str
    try:
        converted: object = convert(str(value))
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise TwinfireError(f"{path}: {name}: {error}") from None
    if action.choices is not None and converted not in action.choices:
        choices = ", ".join(map(str, action.choices))
        raise TwinfireError(f"{path}: {name} is {value!r}; it must be one of {choices}")
    return converted
