"""`twinfire role WORKER decode`: what a worker shall do from now on, without a restart."""

from __future__ import annotations

import argparse

from twinfire.cli.cluster_client import add_connection_arguments, call, show
from twinfire.cli.scale_command import ROLES


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    parser = subparsers.add_parser("role", help="change the role of a worker")
    parser.add_argument("worker", help="its name, or the beginning of its instance id")
    parser.add_argument("role", choices=ROLES)
    add_connection_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Change the role, then print the workers."""
    show(args, call(args, "/cluster/role", {"worker": args.worker, "role": args.role}))
    return 0
