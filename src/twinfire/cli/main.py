"""Entry point of the `twinfire` command: finds the sub-command and runs it.

Errors meant for a person end the process with one line on standard error and status 1; anything
else is a bug and shows its traceback.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from twinfire import __version__
from twinfire.cli import bench_command, chat_command, models_command, serve_command
from twinfire.cli.config_file import set_defaults_from_file
from twinfire.protocol.errors import TwinfireError


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="twinfire", description="Serve language models to agents, from a laptop to a cluster."
    )
    parser.add_argument("--version", action="version", version=f"twinfire {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    serve_command.add_parser(subparsers)
    models_command.add_parser(subparsers)
    chat_command.add_parser(subparsers)
    bench_command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command and return the exit status."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        if getattr(args, "config", None) is not None:
            set_defaults_from_file(args.parser, Path(args.config))
            args = parser.parse_args(argv)
        run: Callable[[argparse.Namespace], int] = args.run
        return run(args)
    except TwinfireError as error:
        print(f"twinfire: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
