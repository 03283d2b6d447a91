"""The option --speculate, of every command that starts workers."""

from __future__ import annotations

import argparse

from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.speculation import parse_speculation


def add_speculate_argument(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, default: str | None = "off"
) -> None:
    """Declare the option; its value is a text that `parse_speculation` takes, or the default."""
    parser.add_argument(
        "--speculate",
        type=_speculation,
        default=default,
        metavar="METHOD[:key=value,...]",
        help="guess tokens ahead and check several in one step: ngram, suffix, eagle3, hybrid or "
        "off; no answer changes (default: off)",
    )


def _speculation(text: str) -> str:
    try:
        parse_speculation(text)
    except InvalidRequest as fault:
        raise argparse.ArgumentTypeError(fault.message) from None
    return text
