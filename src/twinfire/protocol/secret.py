"""The cluster's secret: one file that every gateway and worker of a cluster has a copy of.

Read once at the start of a process. Its text is never logged, sent or put on a command line; what
else needs a shared value gets one derived from it.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from pathlib import Path

from twinfire.protocol.addresses import Address, TcpAddress
from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.worker_config import TlsFiles

MIN_SECRET_BYTES = 16
MAX_SECRET_BYTES = 4096
_NEW_SECRET_BYTES = 32


def load_secret(path: str | Path) -> bytes:
    """Return the secret in a file, without white space around it.

    InvalidRequest when the file cannot be read, is too short or too long, or is open to others.
    """
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(MAX_SECRET_BYTES + 1)
    except OSError as error:
        raise InvalidRequest(f"cannot read the cluster's secret {path}: {error.strerror}") from None
    if os.name == "posix" and mode & (stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP):
        raise InvalidRequest(f"the cluster's secret {path} is open to other users; chmod 600 it")
    secret = content.strip()
    if len(content) > MAX_SECRET_BYTES or len(secret) < MIN_SECRET_BYTES:
        raise InvalidRequest(
            f"the cluster's secret {path} must have {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} bytes"
        )
    return secret


def ensure_secret(path: str | Path) -> bytes:
    """Return the secret in a file, making the file with a new random one if there is none.

    Processes that start at once agree on one secret. InvalidRequest as for `load_secret`, and when
    the file cannot be made.
    """
    path = Path(path)
    if not path.exists():
        try:
            _create(path)
        except OSError as error:
            raise InvalidRequest(
                f"cannot make the cluster's secret {path}: {error.strerror}"
            ) from None
    return load_secret(path)


def hash_seed(secret: bytes) -> bytes:
    """Return the seed of the block hashes: equal within a cluster, telling nothing of the secret.

    32 bytes.
    """
    return hmac.digest(secret, b"twinfire block hashes", "sha256")


def check_exposed(address: Address, secret: bytes | None, tls: TlsFiles | None) -> None:
    """Raise InvalidRequest when others than this host could use a link that nothing protects."""
    if secret is not None or tls is not None:
        return
    if isinstance(address, TcpAddress) and not address.is_loopback:
        raise InvalidRequest(
            f"{address} can be reached from other hosts; give a cluster secret or certificates"
        )


def _create(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(_NEW_SECRET_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        # A link appears whole or not at all, and never replaces what another process made.
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        os.unlink(draft)
