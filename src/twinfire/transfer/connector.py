"""Reading blocks of another worker's KV memory into one's own: what every connector can do.

Only the reader writes the reader's memory, so a late or frozen peer cannot corrupt it. Blocks
travel in the canonical wire layout (`cache.kv_group`), whatever layout either side keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from twinfire.cache.kv_group import KvLayout, WireBuffer, WireBytes
from twinfire.protocol.errors import TwinfireError
from twinfire.protocol.messages import Peer


class ReadFailed(TwinfireError):
    """Blocks could not be read; `stale` when the peer has given them to somebody else since."""

    def __init__(self, message: str, *, stale: bool = False) -> None:
        super().__init__(message)
        self.stale = stale


@dataclass(frozen=True, slots=True)
class RemoteBlock:
    """A block of a peer, good only as long as it has this generation."""

    block_id: int
    generation: int


class KvMemory(Protocol):
    """This worker's blocks, as a connector sees them. Safe to call from any thread.

    A connector imports only into the local blocks of an open read. It may export any block below
    `num_blocks`, and sends on what it got only if the generation was right before and after.
    """

    @property
    def kv_layout(self) -> KvLayout:
        """What a block is made of."""
        ...

    @property
    def draft(self) -> str:
        """What the groups of a draft head are and which head fills them (`Fingerprint.draft`)."""
        ...

    @property
    def num_blocks(self) -> int:
        """Ids lie in [0, num_blocks)."""
        ...

    def export_blocks(self, block_ids: Sequence[int], into: WireBuffer) -> None:
        """Write blocks in the wire layout to `into`, which they fill."""
        ...

    def import_blocks(self, block_ids: Sequence[int], content: WireBytes) -> None:
        """Fill blocks from the wire layout. `content` is the caller's again afterwards."""
        ...

    def block_generation(self, block_id: int) -> int:
        """Return the number that rises whenever the block is handed out."""
        ...


ReadDone = Callable[[ReadFailed | None], None]
"""Called once, on a thread of the connector, when a read has ended; None is success."""


class Connector(Protocol):
    """Reads blocks; owns its sockets, threads and staging memory."""

    @property
    def address(self) -> str:
        """What peers need to reach this connector (`Peer.data`)."""
        ...

    def read(
        self,
        peer: Peer,
        remote: Sequence[RemoteBlock],
        local_ids: Sequence[int],
        on_done: ReadDone,
    ) -> None:
        """Copy `remote` into the local blocks `local_ids`, of the same number, and return at once.

        Reads from one peer are done in order. When `on_done` hears of success, every block was
        read whole while it had its generation; after a failure the local blocks hold anything. In
        either case nothing is written to them any more. A peer that does not answer for
        `timeout_s` fails the read.
        """
        ...

    def forget(self, instance_id: str) -> None:
        """Drop what is kept for a peer that is gone; its open reads fail."""
        ...

    def close(self) -> None:
        """End threads and connections; open reads fail."""
        ...
