"""The puller's side of prefix pulls: blocks that another worker holds instead of computing them.

A pull is an improvement, never a need: whatever goes wrong, the request goes on with what is here.
A state machine without sockets or threads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from twinfire.engine.hand_off import PrefixImport
from twinfire.protocol.messages import Peer, PrefixPull, Submit
from twinfire.protocol.peer_messages import PeerMessage, PullDone, PullGrant, PullRequest
from twinfire.protocol.tokens import unpack_generations, unpack_ids
from twinfire.transfer.connector import ReadFailed, RemoteBlock
from twinfire.transfer.fault_points import FaultPoints
from twinfire.transfer.ports import BlockReader, Peers, PullingEngine

NO_PROGRESS_LIMIT_S = 2.0
"""A pull that gets nowhere for so long is given up."""
MAX_READ_BLOCKS = 64

PullEnded = Callable[[int], None]
"""Called once with the number of blocks that came, when the request can go on."""


@dataclass(slots=True)
class _Pull:
    pull_id: int
    gateway_id: str
    request_id: int
    blocks: PrefixImport
    holder: Peer
    on_end: PullEnded | None
    progress_s: float
    remote: list[RemoteBlock] = field(default_factory=list)
    num_good: int = 0
    reading: bool = False
    over: bool = False


class PrefixPuller:
    """Pulls of this worker."""

    def __init__(
        self,
        engine: PullingEngine,
        peers: Peers,
        reader: BlockReader,
        *,
        clock: Callable[[], float],
        faults: FaultPoints,
    ) -> None:
        self._engine = engine
        self._peers = peers
        self._reader = reader
        self._clock = clock
        self._faults = faults
        self._pulls: dict[int, _Pull] = {}
        self._num_begun = 0

    def __len__(self) -> int:
        return len(self._pulls)

    def begin(self, gateway_id: str, submit: Submit, pull: PrefixPull, on_end: PullEnded) -> None:
        """Pull what is missing here; `on_end` is called at once when nothing can be."""
        prompt = unpack_ids(submit.prompt)
        taken = self._engine.begin_import(prompt, submit.cache_salt, pull.num_blocks)
        if taken is None:
            on_end(0)
            return
        pull_id, self._num_begun = self._num_begun, self._num_begun + 1
        self._pulls[pull_id] = _Pull(
            pull_id, gateway_id, submit.request_id, taken, pull.holder, on_end, self._clock()
        )
        hashes = b"".join(self._engine.import_hashes(taken.import_id))
        self._faults.hit("pull.request")
        self._peers.connect(pull.holder)
        self._peers.send(pull.holder.instance_id, PullRequest(pull_id, hashes))

    def received(self, peer: Peer, message: PeerMessage) -> None:
        """A holder says something."""
        if not isinstance(message, PullGrant):
            return
        pull = self._pulls.get(message.pull_id)
        if pull is None or pull.over or pull.holder.instance_id != peer.instance_id:
            self._peers.send(peer.instance_id, PullDone(message.pull_id))
            return
        if pull.remote:
            return
        self._faults.hit("pull.granted")
        try:
            ids, generations = (
                unpack_ids(message.block_ids),
                unpack_generations(message.generations),
            )
            remote = [RemoteBlock(*pair) for pair in zip(ids, generations, strict=True)]
        except ValueError:
            remote = []
        # From here on the peer is the one that spoke, whose address the connector can use.
        pull.holder, pull.remote = peer, remote[: len(pull.blocks.block_ids)]
        pull.progress_s = self._clock()
        self._read_more(pull)

    def cancel(self, gateway_id: str, request_id: int | None = None) -> bool:
        """Give up for a request, or for all of a gateway; return whether there was any."""
        found = False
        for pull in list(self._pulls.values()):
            if pull.gateway_id == gateway_id and request_id in (None, pull.request_id):
                found = found or pull.on_end is not None
                pull.on_end = None
                self._finish(pull)
        return found

    def peer_lost(self, instance_id: str) -> None:
        """The link to a holder is closed, or could not be opened."""
        for pull in list(self._pulls.values()):
            if pull.holder.instance_id == instance_id:
                self._finish(pull)

    def fence(self) -> None:
        """Give up all pulls: this process stood still, and what was granted is granted no more."""
        for pull in list(self._pulls.values()):
            self._finish(pull)

    def pump(self) -> None:
        """Give up pulls that get nowhere; to be called every pass."""
        limit_s = self._clock() - NO_PROGRESS_LIMIT_S
        for pull in list(self._pulls.values()):
            if pull.progress_s <= limit_s:
                self._finish(pull)

    def renewals(self) -> dict[str, tuple[int, ...]]:
        """Return what is open by holder."""
        ids: dict[str, list[int]] = defaultdict(list)
        for pull in self._pulls.values():
            if not pull.over:
                ids[pull.holder.instance_id].append(pull.pull_id)
        return {instance_id: tuple(found) for instance_id, found in ids.items()}

    def _read_more(self, pull: _Pull) -> None:
        first = pull.num_good
        remote = pull.remote[first : first + MAX_READ_BLOCKS]
        if not remote:
            self._finish(pull)
            return
        self._faults.hit("pull.reading")
        pull.reading = True
        local_ids = pull.blocks.block_ids[first : first + len(remote)]

        def on_end(error: ReadFailed | None) -> None:
            self._on_read_ended(pull, len(remote), error)

        self._reader.start(pull.holder, remote, local_ids, on_end)

    def _on_read_ended(self, pull: _Pull, num_blocks: int, error: ReadFailed | None) -> None:
        pull.reading = False
        if error is None:
            pull.num_good += num_blocks
            pull.progress_s = self._clock()
        if error is not None or pull.over:
            self._finish(pull)
        else:
            self._read_more(pull)

    def _finish(self, pull: _Pull) -> None:
        """Let the request go on; keep the blocks until no read can write them any more."""
        if not pull.over:
            pull.over = True
            self._peers.send(pull.holder.instance_id, PullDone(pull.pull_id))
        if not pull.reading and self._pulls.pop(pull.pull_id, None) is not None:
            self._faults.hit("pull.finish")
            self._engine.finish_import(pull.blocks.import_id, pull.num_good)
        on_end, pull.on_end = pull.on_end, None
        if on_end is not None:
            on_end(0 if pull.reading else pull.num_good)
