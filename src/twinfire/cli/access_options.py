"""Options of every command that starts a gateway: who may call it, what it costs, and TLS."""

from __future__ import annotations

import argparse
import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from twinfire.artifacts.env import Env
from twinfire.protocol.errors import InvalidRequest

if TYPE_CHECKING:
    from twinfire.gateway.accounting.access_mode import AccessMode
    from twinfire.gateway.settings import TlsPair

NO_DATABASE = "none"
_DATABASE_FILE = "twinfire.db"


@dataclass(frozen=True, slots=True)
class AccessOptions:
    """What the operator said; None where nothing was."""

    accounts_db: str | None = None
    prices: Path | None = None
    is_open: bool = False
    needs_token: bool = False
    tls_cert: Path | None = None
    tls_key: Path | None = None

    @property
    def database(self) -> str | None:
        """File or URL of the database; None keeps everything for the process's life only."""
        if self.accounts_db == NO_DATABASE:
            return None
        return self.accounts_db or default_database()

    @property
    def tls(self) -> TlsPair | None:
        """The server's certificate; InvalidRequest for one without its key."""
        from twinfire.gateway.settings import TlsPair

        if self.tls_cert is None and self.tls_key is None:
            return None
        if self.tls_cert is None or self.tls_key is None:
            raise InvalidRequest("--tls-cert and --tls-key go together", "tls-cert")
        return TlsPair(str(self.tls_cert), str(self.tls_key))

    def mode(self, host: str) -> AccessMode:
        """Return who may call a server on `host`: beyond this host nobody without a token."""
        if self.is_open and self.needs_token:
            raise InvalidRequest("--open and --require-token exclude each other", "open")
        if self.is_open:
            return "open"
        return "auto" if _is_loopback(host) and not self.needs_token else "tokens"


def default_database() -> str:
    """Return the file in the user's data folder."""
    return str(Env.read().data_dir / _DATABASE_FILE)


def add_access_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `AccessOptions`."""
    group = parser.add_argument_group("accounts and TLS")
    add_database_argument(group)
    group.add_argument(
        "--prices", type=Path, metavar="FILE", help="TOML file of what models cost (default: free)"
    )
    group.add_argument(
        "--open",
        action="store_true",
        help="serve requests without a token from other hosts too",
    )
    group.add_argument(
        "--require-token",
        action="store_true",
        help="serve nobody without a token (default: on loopback only once a token exists)",
    )
    group.add_argument(
        "--tls-cert", type=Path, metavar="FILE", help="PEM of the certificate chain: serves HTTPS"
    )
    group.add_argument("--tls-key", type=Path, metavar="FILE", help="PEM of its key")


def add_database_argument(parser: argparse._ActionsContainer) -> None:
    """Declare where accounts and usage are."""
    parser.add_argument(
        "--accounts-db",
        metavar="FILE_OR_URL",
        help="SQLite file or postgresql://... of accounts and usage; `none` keeps nothing "
        f"(default: {_DATABASE_FILE} in the user's data folder)",
    )


def access_options(args: argparse.Namespace) -> AccessOptions:
    """Return the options that were parsed."""
    return AccessOptions(
        accounts_db=args.accounts_db,
        prices=args.prices,
        is_open=args.open,
        needs_token=args.require_token,
        tls_cert=args.tls_cert,
        tls_key=args.tls_key,
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
