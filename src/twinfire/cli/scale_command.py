"""`twinfire scale prefill=2 decode=1`: how many supervised workers of each role there shall be."""

from __future__ import annotations

import argparse

from twinfire.cli.cluster_client import add_connection_arguments, call, show

ROLES = ("prefill", "decode", "mixed")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    parser = subparsers.add_parser("scale", help="start or drain workers of a running cluster")
    parser.add_argument("counts", nargs="+", type=_count, metavar="ROLE=N")
    parser.add_argument("--model", help="which model's workers, where there are several")
    add_connection_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Scale each role in turn, then print the workers."""
    status = {}
    for role, count in args.counts:
        status = call(args, "/cluster/scale", {"role": role, "count": count, "model": args.model})
    show(args, status)
    return 0


def _count(text: str) -> tuple[str, int]:
    role, _, count = text.partition("=")
    if role not in ROLES or not count.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: write ROLE=N, ROLE one of {', '.join(ROLES)}")
    return role, int(count)
