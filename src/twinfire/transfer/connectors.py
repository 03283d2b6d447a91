"""Makes the connector that a worker is configured with."""

from __future__ import annotations

from twinfire.protocol.addresses import Address
from twinfire.protocol.worker_config import ConnectorKind, TlsFiles
from twinfire.transfer.connector import Connector, KvMemory
from twinfire.transfer.link_connector import READ_TIMEOUT_S
from twinfire.transfer.nixl_connector import nixl_connector
from twinfire.transfer.socket_connector import socket_connector


def make_connector(
    kind: ConnectorKind,
    memory: KvMemory,
    *,
    instance_id: str,
    listen: Address,
    secret: bytes | None,
    tls: TlsFiles | None,
    timeout_s: float = READ_TIMEOUT_S,
) -> Connector:
    """Return a connector that serves `memory` at `listen` and reads for it.

    With a port of 0 the system chooses one; the connector's `address` has it. Raises InvalidRequest
    when `listen` is open to other hosts and nothing protects it, when certificates are no good, or
    when the kind is not installed; OSError when it cannot listen.
    """
    make = nixl_connector if kind == "nixl" else socket_connector
    return make(
        memory,
        instance_id=instance_id,
        listen=listen,
        secret=secret,
        tls=tls,
        timeout_s=timeout_s,
    )
