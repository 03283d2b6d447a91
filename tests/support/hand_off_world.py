"""Two workers' hand-off state machines joined by in-memory links, on a virtual clock.

Links keep their order and die when told to; reads take time and check generations, as real ones do.
A block's content is the prompt and index that it was computed for, so that any mix-up is seen.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from twinfire.cache.kv_group import WireBuffer
from twinfire.engine.hand_off import (
    BlocksComputed,
    HandOffEvent,
    PromptComputed,
    Reservation,
)
from twinfire.engine.step_report import GatewayOutput
from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.messages import (
    ALL_CHOICES,
    ChoiceDelta,
    HandOff,
    HandOffFailed,
    Peer,
    PromptDone,
    Rejected,
    Reserve,
    Reserved,
    Submit,
    ToGateway,
)
from twinfire.protocol.peer_messages import HandOffKey, PeerMessage, Renew
from twinfire.protocol.sampling import SamplingParams
from twinfire.protocol.tokens import pack_ids
from twinfire.scheduler.prompt_turn import PromptClock, PromptTurn
from twinfire.transfer.connector import ReadFailed, RemoteBlock
from twinfire.transfer.fault_points import FaultPoints
from twinfire.transfer.hand_off_receiver import HandOffReceiver
from twinfire.transfer.hand_off_sender import HandOffSender

BLOCK_SIZE = 4
LEASE_S = 3.0
P_PEER, D_PEER = Peer("p", "mem:p"), Peer("d", "mem:d")
Content = tuple[bytes, int]
"""Prompt and index of a block."""


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Blocks:
    """A pool whose blocks have content and a generation."""

    bytes_per_block = 8

    def __init__(self, num_blocks: int) -> None:
        self.free = list(range(num_blocks))
        self.num_blocks = num_blocks
        self.content: list[Content | None] = [None] * num_blocks
        self.generation = [0] * num_blocks

    def take(self, count: int) -> tuple[int, ...] | None:
        if count > len(self.free):
            return None
        taken = tuple(self.free.pop() for _ in range(count))
        for block_id in taken:
            self.generation[block_id] += 1
            self.content[block_id] = None
        return taken

    def give_back(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            assert block_id not in self.free, "a block was freed twice"
            self.free.append(block_id)

    def export_blocks(self, block_ids: Sequence[int], into: WireBuffer) -> None:
        parts = []
        for block_id in block_ids:
            content = self.content[block_id]
            assert content is not None
            parts.append(struct.pack("<q", hash(content)))
        into[:] = b"".join(parts)


def num_blocks_of(submit: Submit) -> int:
    return -(-(len(submit.prompt) // 4) // BLOCK_SIZE)


@dataclass
class _Prompt:
    key: HandOffKey
    submit: Submit
    turn: PromptTurn
    block_ids: list[int] = field(default_factory=list)
    computed: bool = False


class PrefillEngine:
    """Computes one block a step, in fair turns; loses a prompt's blocks when told to."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = Blocks(num_blocks)
        self.prompts: list[_Prompt] = []
        self.events: list[HandOffEvent] = []
        self.is_starved = False
        self.clock = PromptClock()

    def turn(self, num_uncached: int) -> PromptTurn:
        return PromptTurn(self.clock, num_uncached)

    def submit(self, gateway_id: str, submit: Submit, turn: PromptTurn) -> None:
        if num_blocks_of(submit) > self.blocks.num_blocks:
            raise InvalidRequest("the prompt is too long for the prefill worker")
        key = HandOffKey(gateway_id, submit.request_id, submit.attempt)
        self.prompts.append(_Prompt(key, submit, turn))

    def cancel(self, gateway_id: str, request_id: int, choice: int = ALL_CHOICES) -> None:
        for prompt in list(self.prompts):
            key = prompt.key
            if (key.gateway_id, key.request_id) == (gateway_id, request_id) and not prompt.computed:
                self.release_hold(key)

    def release_hold(self, key: HandOffKey) -> None:
        for prompt in list(self.prompts):
            if prompt.key == key:
                self.prompts.remove(prompt)
                self.blocks.give_back(prompt.block_ids)

    def preempt(self) -> None:
        for prompt in self.prompts:
            if not prompt.computed and prompt.block_ids:
                self.blocks.give_back(prompt.block_ids)
                prompt.block_ids = []
                return

    def step(self) -> None:
        self.is_starved = False
        for prompt in sorted(self.prompts, key=lambda one: -one.turn.slowdown()):
            if prompt.computed:
                continue
            taken = self.blocks.take(1)
            if taken is None:
                self.is_starved = True
                return
            (block_id,) = taken
            self.clock.now += BLOCK_SIZE
            index = len(prompt.block_ids)
            prompt.block_ids.append(block_id)
            self.blocks.content[block_id] = (prompt.submit.prompt, index)
            generation = self.blocks.generation[block_id]
            self.events.append(BlocksComputed(prompt.key, index, (block_id,), (generation,)))
            if index + 1 == num_blocks_of(prompt.submit):
                prompt.computed = True
                first = tuple(
                    ChoiceDelta(prompt.key.request_id, choice, pack_ids([7 + choice]))
                    for choice in range(prompt.submit.sampling.n)
                )
                done = PromptDone(prompt.key.request_id, 0, 0.0, 0.0)
                feature = prompt.submit.prompt[:4]
                self.events.append(PromptComputed(prompt.key, index + 1, done, first, feature))
            return


class DecodeEngine:
    """Reserves blocks; on adoption every block must hold what the prompt calls for."""

    def __init__(self, num_blocks: int, num_cached: int = 0) -> None:
        self.blocks = Blocks(num_blocks)
        self.num_cached = num_cached
        self.refuses_first_tokens = False
        self.reserved: dict[HandOffKey, tuple[Submit, tuple[int, ...]]] = {}
        self.running: dict[HandOffKey, tuple[int, ...]] = {}

    def reserve(self, gateway_id: str, message: Submit) -> Reservation | None:
        count = num_blocks_of(message)
        if count > self.blocks.num_blocks:
            raise InvalidRequest("the prompt is too long for the decode worker")
        taken = self.blocks.take(count)
        if taken is None:
            return None
        key = HandOffKey(gateway_id, message.request_id, message.attempt)
        assert key not in self.reserved
        self.reserved[key] = (message, taken)
        num_cached = min(self.num_cached, count - 1)
        for index in range(num_cached):
            self.blocks.content[taken[index]] = (message.prompt, index)
        return Reservation(key, taken, num_cached)

    def adopt(
        self,
        key: HandOffKey,
        prompt: PromptDone,
        first: Sequence[ChoiceDelta],
        *,
        has_draft_kv: bool = True,
        draft_feature: bytes = b"",
    ) -> GatewayOutput:
        assert has_draft_kv, "both sides have the same head"
        if self.refuses_first_tokens:
            raise InvalidRequest("a first token is not in the vocabulary")
        submit, block_ids = self.reserved.pop(key)
        assert draft_feature == submit.prompt[:4], "the feature of another prompt"
        for index, block_id in enumerate(block_ids):
            assert self.blocks.content[block_id] == (submit.prompt, index), "wrong content adopted"
        self.running[key] = block_ids
        return GatewayOutput(prompts=[prompt], deltas=list(first))

    def release_reservation(self, key: HandOffKey) -> None:
        if key in self.reserved:
            self.blocks.give_back(self.reserved.pop(key)[1])

    def cancel(self, gateway_id: str, request_id: int, choice: int = ALL_CHOICES) -> None:
        for key in list(self.running):
            is_named = (key.gateway_id, key.request_id) == (gateway_id, request_id)
            if is_named and choice == ALL_CHOICES:
                self.blocks.give_back(self.running.pop(key))

    def finish(self) -> None:
        for key in list(self.running):
            self.blocks.give_back(self.running.pop(key))


class Wire:
    """One direction of a link, as a queue that keeps order."""

    def __init__(self, end: Peer, connected: Callable[[], bool]) -> None:
        self._end = end
        self.queue: deque[PeerMessage] = deque()
        self._connected = connected
        self.drops: list[tuple[str, str]] = []

    def connect(self, peer: Peer) -> None:
        del peer

    def send(self, instance_id: str, message: PeerMessage) -> None:
        if instance_id == self._end.instance_id and self._connected():
            self.queue.append(message)

    def drop(self, instance_id: str, reason: str) -> None:
        self.drops.append((instance_id, reason))


class Gateway:
    """Keeps what workers say of each attempt."""

    def __init__(self) -> None:
        self.ends: dict[int, list[str]] = {}
        self.reserved: list[int] = []

    def send(self, gateway_id: str, message: ToGateway) -> None:
        assert gateway_id == "g"
        match message:
            case HandOffFailed(request_id):
                self.ends.setdefault(request_id, []).append("failed")
            case Rejected(request_id):
                self.ends.setdefault(request_id, []).append("rejected")
            case Reserved(request_id):
                self.reserved.append(request_id)

    def accepted(self, gateway_id: str, output: GatewayOutput) -> None:
        assert gateway_id == "g"
        for prompt in output.prompts:
            assert prompt.hand_off is not None
            self.ends.setdefault(prompt.request_id, []).append("accepted")


@dataclass
class _Read:
    remote: Sequence[RemoteBlock]
    local_ids: Sequence[int]
    on_end: Callable[[ReadFailed | None], None]


class Reader:
    """Reads end one by one when told to, with what the blocks hold then."""

    def __init__(self, source: Blocks, target: Blocks) -> None:
        self.source, self.target = source, target
        self.open: deque[_Read] = deque()

    def start(
        self,
        peer: Peer,
        remote: Sequence[RemoteBlock],
        local_ids: Sequence[int],
        on_end: Callable[[ReadFailed | None], None],
    ) -> None:
        assert peer == P_PEER
        self.open.append(_Read(remote, local_ids, on_end))

    def end_one(self, *, broken: bool = False) -> None:
        if not self.open:
            return
        read = self.open.popleft()
        for block, local_id in zip(read.remote, read.local_ids, strict=True):
            assert local_id not in self.target.free, "a read writes a block that was freed"
            # What a stale or broken read leaves behind is anything.
            self.target.content[local_id] = self.source.content[block.block_id]
        stale = any(
            self.source.generation[block.block_id] != block.generation
            or block.block_id in self.source.free
            for block in read.remote
        )
        if broken or stale:
            for local_id in read.local_ids:
                self.target.content[local_id] = (b"garbage", 0)
            read.on_end(ReadFailed("not read", stale=stale))
        else:
            read.on_end(None)


class World:
    """A prefill worker, a decode worker, a gateway, and everything that can go wrong."""

    def __init__(
        self,
        *,
        prefill_blocks: int = 24,
        decode_blocks: int = 24,
        num_cached: int = 0,
        checksums: bool = False,
    ) -> None:
        self.clock = Clock()
        self.connected = True
        self.to_decode = Wire(D_PEER, lambda: self.connected)
        self.to_prefill = Wire(P_PEER, lambda: self.connected)
        self.prefill = PrefillEngine(prefill_blocks)
        self.decode = DecodeEngine(decode_blocks, num_cached)
        self.reader = Reader(self.prefill.blocks, self.decode.blocks)
        self.gateway = Gateway()
        self.frozen: set[str] = set()
        faults = FaultPoints()
        self.sender = HandOffSender(
            self.prefill,
            self.to_decode,
            self.gateway,
            self._admit,
            lambda: 0,
            lease_s=LEASE_S,
            clock=self.clock,
            faults=faults,
            draft="",
            content=self.prefill.blocks if checksums else None,
        )
        self.receiver = HandOffReceiver(
            self.decode,
            self.to_prefill,
            self.gateway,
            self.reader,
            self.gateway.accepted,
            content=self.decode.blocks,
            block_size=BLOCK_SIZE,
            bytes_per_block=8,
            draft="",
            lease_s=LEASE_S,
            clock=self.clock,
            faults=faults,
        )

    def _admit(self, gateway_id: str, submit: Submit, turn: PromptTurn) -> None:
        try:
            self.prefill.submit(gateway_id, submit, turn)
        except InvalidRequest as error:
            self.sender.refused(gateway_id, submit, error)

    def request(
        self,
        request_id: int,
        num_tokens: int,
        *,
        n: int = 1,
        reserve: bool = True,
        timeout_s: float | None = None,
        num_uncached: int | None = None,
    ) -> None:
        prompt = pack_ids([request_id, *range(num_tokens - 1)])
        sampling = SamplingParams(max_tokens=4, seed=1, n=n)
        submit = Submit(request_id, prompt, sampling, timeout_s=timeout_s)
        if reserve:
            self.receiver.reserve("g", Reserve(submit, "p"))
        self.sender.submit("g", submit, HandOff(D_PEER, num_uncached))

    def cancel(self, request_id: int) -> None:
        self.gateway.ends.setdefault(request_id, []).append("cancelled")
        self.sender.cancel("g", request_id)
        self.receiver.cancel("g", request_id)
        self.decode.cancel("g", request_id)

    def deliver(self, *, to_decode: bool) -> None:
        wire = self.to_decode if to_decode else self.to_prefill
        if not wire.queue or ("d" if to_decode else "p") in self.frozen:
            return
        message = wire.queue.popleft()
        if to_decode:
            self.receiver.received(P_PEER, message)
        else:
            self.sender.received(D_PEER, message)

    def step(self) -> None:
        if "p" not in self.frozen:
            self.prefill.step()
            events, self.prefill.events = self.prefill.events, []
            for event in events:
                self.sender.engine_event(event)

    def cut(self) -> None:
        """Lose the link and what it carried; the next message finds a new one."""
        self.to_decode.queue.clear()
        self.to_prefill.queue.clear()
        # A frozen worker drops everything when it wakes, before it hears of this.
        if "p" not in self.frozen:
            self.sender.peer_lost("d", "cut")
        if "d" not in self.frozen:
            self.receiver.peer_lost("p", "cut")

    def pass_time(self, seconds: float) -> None:
        for _ in range(max(1, round(seconds / 0.5))):
            self.clock.now_s += min(0.5, seconds)
            if "p" not in self.frozen:
                for instance_id, keys in self.sender.renewals().items():
                    self.to_decode.send(instance_id, Renew(keys))
            if "d" not in self.frozen:
                for instance_id, keys in self.receiver.renewals().items():
                    self.to_prefill.send(instance_id, Renew(keys))
            self.settle()

    def settle(self) -> None:
        """Deliver all that is under way and let both sides sweep."""
        while True:
            if "p" not in self.frozen:
                self.sender.pump()
            if "d" not in self.frozen:
                self.receiver.pump()
            busy = (self.to_decode.queue and "d" not in self.frozen) or (
                self.to_prefill.queue and "p" not in self.frozen
            )
            if not busy:
                break
            self.deliver(to_decode=True)
            self.deliver(to_decode=False)
        if self.to_decode.drops or self.to_prefill.drops:
            self.to_decode.drops.clear()
            self.to_prefill.drops.clear()
            self.cut()

    def thaw(self, worker: str) -> None:
        """A worker that was frozen for longer than a lease wakes up."""
        self.frozen.discard(worker)
        if worker == "p":
            self.sender.fence("it stood still")
        else:
            self.receiver.fence("it stood still")

    def run_down(self, random: Random) -> None:
        """Go on without faults until nothing is under way."""
        self.connected = True
        for worker in list(self.frozen):
            self.clock.now_s += 2 * LEASE_S
            self.thaw(worker)
        for _ in range(400):
            self.step()
            self.reader.end_one()
            self.settle()
            self.decode.finish()
            self.pass_time(random.choice([0.03, 0.1]))
            if not (len(self.sender) or len(self.receiver) or self.reader.open):
                return
        raise AssertionError("hand-offs go on for ever")

    def check_nothing_left(self) -> None:
        assert len(self.prefill.blocks.free) == self.prefill.blocks.num_blocks
        assert len(self.decode.blocks.free) == self.decode.blocks.num_blocks
        assert not self.prefill.prompts
        assert not self.decode.reserved
