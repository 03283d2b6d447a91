"""A puller and a holder against each other, on a virtual clock."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.hand_off_world import LEASE_S, Clock, Wire
from twinfire.engine.hand_off import BlockHold, PrefixImport
from twinfire.protocol.messages import Peer, PrefixPull, Submit
from twinfire.protocol.peer_messages import PullGrant, PullRequest, Renew
from twinfire.protocol.sampling import SamplingParams
from twinfire.protocol.tokens import pack_generations, pack_ids
from twinfire.transfer.connector import ReadFailed, RemoteBlock
from twinfire.transfer.fault_points import FaultPoints
from twinfire.transfer.prefix_holder import MAX_GRANTS_PER_PEER, PrefixHolder
from twinfire.transfer.prefix_pull import NO_PROGRESS_LIMIT_S, PrefixPuller

PULLER, HOLDER = Peer("puller", "mem:a"), Peer("holder", "mem:b")
NUM_BLOCKS = 150


def block_hash(index: int) -> bytes:
    return index.to_bytes(32, "little")


class Engine:
    """Counts what is taken, pinned and registered."""

    def __init__(self, num_held: int = NUM_BLOCKS) -> None:
        self.num_held = num_held
        self.imports: dict[int, int] = {}
        self.registered: list[int] = []
        self.holds: set[int] = set()
        self._next_id = 0

    def begin_import(
        self, prompt: array[int], cache_salt: str, num_blocks: int
    ) -> PrefixImport | None:
        if num_blocks == 0:
            return None
        self._next_id += 1
        self.imports[self._next_id] = num_blocks
        return PrefixImport(self._next_id, 0, tuple(range(num_blocks)))

    def import_hashes(self, import_id: int) -> list[bytes]:
        return [block_hash(index) for index in range(self.imports[import_id])]

    def finish_import(self, import_id: int, num_good_blocks: int) -> None:
        assert num_good_blocks <= self.imports.pop(import_id)
        self.registered.append(num_good_blocks)

    def hold_blocks(self, hashes: Sequence[bytes]) -> BlockHold:
        self._next_id += 1
        self.holds.add(self._next_id)
        count = min(len(hashes), self.num_held)
        return BlockHold(self._next_id, tuple(range(count)), (1,) * count)

    def release_block_hold(self, hold_id: int) -> None:
        self.holds.remove(hold_id)


class World:
    def __init__(self, num_held: int = NUM_BLOCKS) -> None:
        self.clock = Clock()
        self.engine, self.holding = Engine(), Engine(num_held)
        self.to_holder = Wire(HOLDER, lambda: True)
        self.to_puller = Wire(PULLER, lambda: True)
        self.reads: deque[tuple[int, Callable[[ReadFailed | None], None]]] = deque()
        self.results: dict[int, int] = {}
        faults = FaultPoints()
        self.puller = PrefixPuller(
            self.engine, self.to_holder, self, clock=self.clock, faults=faults
        )
        self.holder = PrefixHolder(
            self.holding, self.to_puller, lease_s=LEASE_S, clock=self.clock, faults=faults
        )

    def start(
        self,
        peer: Peer,
        remote: Sequence[RemoteBlock],
        local_ids: Sequence[int],
        on_end: Callable[[ReadFailed | None], None],
    ) -> None:
        assert len(remote) == len(local_ids) > 0
        assert peer == HOLDER
        self.reads.append((len(remote), on_end))

    def end_read(self, error: ReadFailed | None = None) -> None:
        if self.reads:
            self.reads.popleft()[1](error)

    def pull(self, request_id: int, num_blocks: int = NUM_BLOCKS) -> None:
        submit = Submit(request_id, pack_ids([1, 2]), SamplingParams(max_tokens=1, seed=1))

        def on_end(num_pulled: int) -> None:
            assert request_id not in self.results, "a request went on twice"
            self.results[request_id] = num_pulled

        self.puller.begin("g", submit, PrefixPull(HOLDER, num_blocks), on_end)

    def deliver(self) -> None:
        while self.to_holder.queue:
            self.holder.received(PULLER, self.to_holder.queue.popleft())
        while self.to_puller.queue:
            self.puller.received(HOLDER, self.to_puller.queue.popleft())

    def pass_time(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.puller.pump()
        self.holder.pump()

    def check_nothing_left(self) -> None:
        assert not self.engine.imports
        assert not self.holding.holds
        assert not len(self.puller)
        assert not len(self.holder)


@pytest.mark.parametrize("num_held", [0, 1, 70, NUM_BLOCKS])
def test_a_prefix_comes_as_far_as_it_is_held(num_held: int) -> None:
    world = World(num_held)
    world.pull(0)
    for _ in range(4):
        world.deliver()
        world.end_read()
    world.deliver()
    assert world.results == {0: num_held}
    assert world.engine.registered == [num_held]
    world.check_nothing_left()


def test_nothing_to_pull_lets_the_request_go_on_at_once() -> None:
    world = World()
    world.pull(0, num_blocks=0)
    assert world.results == {0: 0}


def test_a_fault_keeps_what_has_come_and_lets_the_request_go_on() -> None:
    world = World()
    world.pull(0)
    world.deliver()
    world.end_read()
    world.end_read(ReadFailed("gone", stale=True))
    world.deliver()
    assert world.results == {0: 64}
    world.check_nothing_left()


def test_a_silent_holder_costs_only_a_bounded_time() -> None:
    world = World()
    world.pull(0)
    world.pass_time(NO_PROGRESS_LIMIT_S + 0.1)
    assert world.results == {0: 0}
    world.deliver()
    world.deliver()
    world.check_nothing_left()


def test_blocks_are_kept_until_a_slow_read_has_ended() -> None:
    world = World()
    world.pull(0)
    world.deliver()
    world.pass_time(NO_PROGRESS_LIMIT_S + 0.1)
    assert world.results == {0: 0}
    assert world.engine.imports
    world.end_read()
    world.deliver()
    world.check_nothing_left()


def test_a_grant_is_held_while_it_is_renewed() -> None:
    world = World()
    world.pull(0)
    world.deliver()
    pull_ids = world.puller.renewals()[HOLDER.instance_id]
    for _ in range(4):
        world.clock.now_s += LEASE_S / 2
        world.holder.received(PULLER, Renew((), pull_ids))
        world.holder.pump()
    assert world.holding.holds
    world.clock.now_s += LEASE_S
    world.holder.pump()
    assert not world.holding.holds


def test_one_peer_cannot_pin_without_limit() -> None:
    world = World()
    for pull_id in range(MAX_GRANTS_PER_PEER + 5):
        world.holder.received(PULLER, PullRequest(pull_id, block_hash(0)))
    assert len(world.holding.holds) == MAX_GRANTS_PER_PEER
    world.holder.received(PULLER, PullRequest(999, b"no hash"))
    assert world.to_puller.queue[-1] == PullGrant(999, b"", b"")
    world.holder.peer_lost(PULLER.instance_id)
    assert not world.holding.holds


def test_a_malformed_grant_is_no_grant() -> None:
    world = World()
    world.pull(0)
    (pull_id,) = world.puller.renewals()[HOLDER.instance_id]
    world.puller.received(HOLDER, PullGrant(pull_id, pack_ids([1, 2]), pack_generations([1])))
    assert world.results == {0: 0}


ACTIONS = st.lists(
    st.sampled_from(["pull", "deliver", "read", "bad read", "time", "cancel", "lost", "fence"]),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(ACTIONS)
def test_every_request_goes_on_once_and_nothing_stays(actions: list[str]) -> None:
    world, num_pulls, cancelled = World(70), 0, set()
    for action in actions:
        match action:
            case "pull":
                world.pull(num_pulls)
                num_pulls += 1
            case "deliver":
                world.deliver()
            case "read":
                world.end_read()
            case "bad read":
                world.end_read(ReadFailed("broken"))
            case "time":
                world.pass_time(1.0)
            case "cancel" if num_pulls:
                if world.puller.cancel("g", num_pulls - 1):
                    cancelled.add(num_pulls - 1)
            case "lost":
                world.puller.peer_lost(HOLDER.instance_id)
                world.holder.peer_lost(PULLER.instance_id)
            case "fence":
                world.puller.fence()
                world.holder.release_all()
    for _ in range(200):
        world.deliver()
        world.end_read()
    world.pass_time(NO_PROGRESS_LIMIT_S + LEASE_S)
    world.deliver()
    world.check_nothing_left()
    assert world.results.keys() | cancelled == set(range(num_pulls))
    assert not world.results.keys() & cancelled
