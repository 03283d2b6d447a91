"""A worker's connector with its memory, and reads that can be waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from support.array_memory import ArrayMemory
from twinfire.protocol.addresses import Address, TcpAddress, UnixAddress
from twinfire.protocol.messages import Peer
from twinfire.protocol.worker_config import ConnectorKind, TlsFiles
from twinfire.transfer.connector import Connector, ReadFailed, RemoteBlock
from twinfire.transfer.connectors import make_connector

SECRET = b"secret of the connector tests"
LOOPBACK = TcpAddress("127.0.0.1", 0)


class Outcome:
    """What `on_done` was told, and how often."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.calls: list[ReadFailed | None] = []

    def __call__(self, failure: ReadFailed | None) -> None:
        self.calls.append(failure)
        self._event.set()

    @property
    def is_known(self) -> bool:
        return self._event.is_set()

    def wait(self, timeout_s: float = 20) -> ReadFailed | None:
        assert self._event.wait(timeout_s), "on_done was not called"
        assert len(self.calls) == 1
        return self.calls[0]


class End:
    """One worker: `peer` is what others know of it."""

    def __init__(
        self,
        kind: ConnectorKind,
        memory: ArrayMemory,
        listen: Address = LOOPBACK,
        *,
        name: str = "here",
        secret: bytes | None = SECRET,
        tls: TlsFiles | None = None,
        timeout_s: float = 5.0,
    ) -> None:
        self.memory = memory
        self.connector: Connector = make_connector(
            kind,
            memory,
            instance_id=name,
            listen=listen,
            secret=secret,
            tls=tls,
            timeout_s=timeout_s,
        )
        self.peer = Peer(name, "", self.connector.address)

    def read(
        self, peer: Peer, blocks: Sequence[RemoteBlock], local_ids: Sequence[int] | None = None
    ) -> Outcome:
        outcome = Outcome()
        if local_ids is None:
            local_ids = range(len(blocks))
        self.connector.read(peer, blocks, local_ids, outcome)
        return outcome


MakeEnd = Callable[..., End]


def blocks_of(memory: ArrayMemory, block_ids: Sequence[int]) -> list[RemoteBlock]:
    """Blocks as their owner would announce them: those that it has finished writing."""
    return [RemoteBlock(block_id, memory.written[block_id]) for block_id in block_ids]


def first_life(block_ids: Sequence[int]) -> list[RemoteBlock]:
    """Blocks of a memory that was filled once."""
    return [RemoteBlock(block_id, 1) for block_id in block_ids]


def unix_address(folder: Path, name: str) -> UnixAddress:
    return UnixAddress(str(folder / f"{name}.sock"))
