"""`--alias NAME=MODEL`: another name under which a model answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from twinfire.protocol.errors import InvalidRequest


class _Arguments(Protocol):
    def add_argument(
        self, name: str, /, *, action: str, default: list[str], metavar: str, help: str
    ) -> object: ...


def add_alias_argument(parser: _Arguments) -> None:
    """Declare the option."""
    parser.add_argument(
        "--alias",
        action="append",
        default=[],
        metavar="NAME=MODEL",
        help="answer to NAME as well, repeatable; such as @cf/moonshotai/kimi-k2.5=MODEL",
    )


def parse_aliases(given: Sequence[str]) -> dict[str, str]:
    """Return each alias with its model's name; InvalidRequest for what is not NAME=MODEL."""
    aliases: dict[str, str] = {}
    for text in given:
        alias, sign, model = (part.strip() for part in text.partition("="))
        if not (alias and sign and model):
            raise InvalidRequest(f"--alias takes NAME=MODEL, got {text!r}", "alias")
        if aliases.get(alias, model) != model:
            raise InvalidRequest(f"--alias gives `{alias}` to two models", "alias")
        aliases[alias] = model
    return aliases
