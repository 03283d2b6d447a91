"""A connector over links between pairs of workers: a server of own blocks, a reader per peer.

What is particular to a kind of connector is its carrier alone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from twinfire.protocol.addresses import Address, parse_address
from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.messages import Peer
from twinfire.protocol.secret import check_exposed
from twinfire.protocol.worker_config import TlsFiles
from twinfire.transfer.block_read import BlockRead
from twinfire.transfer.block_reader import BlockReader
from twinfire.transfer.block_server import BlockServer
from twinfire.transfer.carrier import Carrier
from twinfire.transfer.connector import KvMemory, ReadDone, ReadFailed, RemoteBlock
from twinfire.transfer.data_link import DATA_VERSION, LinkHello, LinkSecurity, layout_text
from twinfire.transfer.shared_blocks import target_part

READ_TIMEOUT_S = 5.0
"""How long a peer may say nothing while it is being read from."""
_CLOSE_TIMEOUT_S = 10.0

log = logging.getLogger(__name__)


class LinkConnector:
    """Implements `Connector`; owns `carrier`.

    Raises InvalidRequest when `listen` is open to other hosts and nothing protects it, or when the
    certificates are no good; OSError when it cannot listen.
    """

    def __init__(
        self,
        memory: KvMemory,
        carrier: Carrier,
        *,
        instance_id: str,
        listen: Address,
        secret: bytes | None,
        tls: TlsFiles | None,
        timeout_s: float = READ_TIMEOUT_S,
    ) -> None:
        check_exposed(listen, secret, tls)
        self._memory = memory
        self._carrier = carrier
        self._instance_id = instance_id
        self._timeout_s = timeout_s
        self._security = LinkSecurity.of(secret, tls)
        self._layout = layout_text(target_part(memory.kv_layout))
        self._lock = threading.Lock()
        self._closed = False
        self._readers: dict[str, BlockReader] = {}
        self._stopped: list[BlockReader] = []
        self._server = BlockServer(
            memory, listen, self._hello_to(""), security=self._security, carrier=carrier
        )

    @property
    def address(self) -> str:
        """What peers need to reach this connector (`Peer.data`)."""
        return str(self._server.address)

    def read(
        self,
        peer: Peer,
        remote: Sequence[RemoteBlock],
        local_ids: Sequence[int],
        on_done: ReadDone,
    ) -> None:
        """Copy `remote` into the local blocks `local_ids`, of the same number; see `Connector`."""
        read = BlockRead(remote, local_ids, on_done)
        try:
            address = parse_address(peer.data)
        except InvalidRequest as error:
            _end_elsewhere(read, f"worker {peer.instance_id} cannot be read from: {error}")
            return
        with self._lock:
            submitted = not self._closed and self._reader_of(peer, address).submit(read)
        if not submitted:
            _end_elsewhere(read, "the connector is closed")

    def forget(self, instance_id: str) -> None:
        """Drop what is kept for a peer that is gone; its open reads fail."""
        with self._lock:
            reader = self._readers.pop(instance_id, None)
            if reader is not None:
                self._stop(reader, f"worker {instance_id} is gone")

    def close(self) -> None:
        """End threads and connections; open reads fail."""
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for reader in self._readers.values():
                self._stop(reader, "the connector is closed")
            self._readers.clear()
            stopped, self._stopped = self._stopped, []
        for reader in stopped:
            reader.join(max(0.0, deadline - time.monotonic()))
        self._server.close(max(1.0, deadline - time.monotonic()))
        self._carrier.close()

    def _reader_of(self, peer: Peer, address: Address) -> BlockReader:
        reader = self._readers.get(peer.instance_id)
        if reader is not None and reader.address != address:
            self._stop(reader, f"worker {peer.instance_id} is at another address now")
            reader = None
        if reader is None:
            reader = self._readers[peer.instance_id] = BlockReader(
                self._memory,
                address,
                self._hello_to(peer.instance_id),
                security=self._security,
                carrier=self._carrier,
                timeout_s=self._timeout_s,
            )
        return reader

    def _stop(self, reader: BlockReader, reason: str) -> None:
        reader.stop(reason)
        self._stopped = [other for other in self._stopped if other.is_alive]
        self._stopped.append(reader)

    def _hello_to(self, meant_id: str) -> LinkHello:
        return LinkHello(
            DATA_VERSION,
            self._carrier.name,
            self._instance_id,
            meant_id,
            self._layout,
            draft=self._memory.draft,
        )


def _end_elsewhere(read: BlockRead, reason: str) -> None:
    """End a read that no thread has taken on, as its caller may hold what `on_done` wants."""
    threading.Thread(target=read.end, args=(ReadFailed(reason),), daemon=True).start()
