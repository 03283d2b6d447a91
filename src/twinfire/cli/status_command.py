"""`twinfire status`: the workers of a running cluster."""

from __future__ import annotations

import argparse

from twinfire.cli.cluster_client import add_connection_arguments, call, show


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    parser = subparsers.add_parser("status", help="list the workers of a running cluster")
    add_connection_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the workers."""
    show(args, call(args, "/cluster/status"))
    return 0
