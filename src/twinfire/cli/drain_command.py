"""`twinfire drain WORKER`: let a worker finish what it runs and end."""

from __future__ import annotations

import argparse

from twinfire.cli.cluster_client import add_connection_arguments, call, show


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    parser = subparsers.add_parser("drain", help="let a worker finish what it runs and end")
    parser.add_argument("worker", help="its name, or the beginning of its instance id")
    add_connection_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Begin the drain, then print the workers."""
    show(args, call(args, "/cluster/drain", {"worker": args.worker}))
    return 0
