"""TLS between the parts of a cluster: both ends show a certificate of the cluster's authority.

What a certificate proves is membership: the authority must sign nothing but ends of this cluster.
Names are not compared with addresses, because workers come and go at any of them, and which worker
answers is checked by its instance id.
"""

from __future__ import annotations

import ssl

from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.worker_config import TlsFiles


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """Return the settings of an end that connects; InvalidRequest names a file that is no good."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    return _mutual(context, files)


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """Return the settings of an end that listens; InvalidRequest names a file that is no good."""
    return _mutual(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), files)


def _mutual(context: ssl.SSLContext, files: TlsFiles) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    for path in (files.authority, files.certificate, files.key):
        _check_readable(path)
    try:
        context.load_verify_locations(cafile=files.authority)
    except ssl.SSLError as error:
        raise InvalidRequest(f"{files.authority} holds no certificates: {error.reason}") from None
    try:
        # An encrypted key would otherwise be asked for on the terminal.
        context.load_cert_chain(files.certificate, files.key, password=b"")
    except (ssl.SSLError, ValueError) as error:
        reason = error.reason if isinstance(error, ssl.SSLError) else str(error)
        raise InvalidRequest(
            f"{files.certificate} and {files.key} are no certificate with its key: {reason}"
        ) from None
    return context


def _check_readable(path: str) -> None:
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}") from None
