"""Reads whose ends are reported on the worker's own thread, not on the connector's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from twinfire.protocol.messages import Peer
from twinfire.transfer.connector import Connector, ReadFailed, RemoteBlock


@dataclass(frozen=True, slots=True)
class ReadEnded:
    """The connector is done with a read."""

    read_id: int
    error: ReadFailed | None


class BlockReads:
    """Open reads. `post` is called on a thread of the connector; its item comes back to `ended`."""

    def __init__(self, connector: Connector, post: Callable[[ReadEnded], None]) -> None:
        self._connector = connector
        self._post = post
        self._callbacks: dict[int, Callable[[ReadFailed | None], None]] = {}
        self._num_started = 0

    def __len__(self) -> int:
        return len(self._callbacks)

    def start(
        self,
        peer: Peer,
        remote: Sequence[RemoteBlock],
        local_ids: Sequence[int],
        on_end: Callable[[ReadFailed | None], None],
    ) -> None:
        """Begin a read; `on_end` is called by `ended`."""
        read_id, self._num_started = self._num_started, self._num_started + 1
        self._callbacks[read_id] = on_end
        self._connector.read(
            peer, remote, local_ids, lambda error: self._post(ReadEnded(read_id, error))
        )

    def ended(self, item: ReadEnded) -> None:
        """Report to whoever began the read."""
        callback = self._callbacks.pop(item.read_id, None)
        if callback is not None:
            callback(item.error)
