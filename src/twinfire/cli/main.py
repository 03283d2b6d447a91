"""Entry point of the `twinfire` command: finds the sub-command and runs it.

Errors meant for a person end the process with one line on standard error and status 1; anything
else is a bug and shows its traceback.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from twinfire import __version__
from twinfire.protocol.errors import TwinfireError

COMMANDS = (
    *("serve", "up", "worker", "status", "scale", "role", "drain"),
    *("edge", "models", "chat", "bench", "accounts", "draft"),
)


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of the whole command line, or of one command alone.

    Each command's own imports cost more than parsing, and a server's start waits for them.
    """
    parser = argparse.ArgumentParser(
        prog="twinfire", description="Serve language models to agents, from a laptop to a cluster."
    )
    parser.add_argument("--version", action="version", version=f"twinfire {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in COMMANDS if command is None else (command,):
        import_module(f"twinfire.cli.{name}_command").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command and return the exit status."""
    words = sys.argv[1:] if argv is None else argv
    parser = build_parser(words[0] if words and words[0] in COMMANDS else None)
    args = parser.parse_args(words)
    try:
        if getattr(args, "config", None) is not None:
            from twinfire.cli.config_file import set_defaults_from_file

            set_defaults_from_file(args.parser, Path(args.config))
            args = parser.parse_args(words)
        run: Callable[[argparse.Namespace], int] = args.run
        return run(args)
    except TwinfireError as error:
        print(f"twinfire: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
