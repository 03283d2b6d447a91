"""What every connector does when nothing is wrong, and how it names what is stale."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from support.array_memory import LARGE, ArrayMemory, content_of
from support.connector_ends import LOOPBACK, SECRET, End, MakeEnd, Outcome, blocks_of, unix_address
from support.tls_files import GATEWAY, WORKER
from twinfire.cache.kv_group import WireBuffer
from twinfire.protocol.addresses import Address, TcpAddress
from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.messages import Peer
from twinfire.transfer.connector import RemoteBlock

SHUFFLED = random.Random(5).sample(range(400), 300)


@pytest.mark.parametrize(
    "remote_ids",
    [[3], [399, 0], SHUFFLED, list(range(400)), [5, 5, 5]],
    ids=["one", "ends", "shuffled", "all", "repeated"],
)
def test_blocks_arrive_as_they_are(
    make_end: MakeEnd, listen: Address, remote_ids: list[int]
) -> None:
    there = make_end(ArrayMemory(400).fill(), listen, name="there")
    here = make_end(ArrayMemory(500))
    local_ids = random.Random(6).sample(range(500), len(remote_ids))
    assert here.read(there.peer, blocks_of(there.memory, remote_ids), local_ids).wait() is None
    for remote_id, local_id in zip(remote_ids, local_ids, strict=True):
        assert np.array_equal(here.memory.words[local_id], there.memory.expected(remote_id))
    untouched = sorted(set(range(500)) - set(local_ids))
    assert not here.memory.words[untouched].any()


def test_blocks_of_the_default_model_take_several_requests(
    make_end: MakeEnd, listen: Address
) -> None:
    there = make_end(ArrayMemory(13, LARGE).fill(), listen, name="there")
    here = make_end(ArrayMemory(13, LARGE))
    order = random.Random(7).sample(range(13), 13)
    assert here.read(there.peer, blocks_of(there.memory, order), order).wait() is None
    assert np.array_equal(here.memory.words, there.memory.words)
    assert len(here.memory.imports) == 3
    assert [block_id for ids in here.memory.imports for block_id in ids] == order


def test_reading_no_blocks_succeeds(make_end: MakeEnd) -> None:
    there, here = make_end(ArrayMemory(1).fill(), name="there"), make_end(ArrayMemory(1))
    assert here.read(there.peer, []).wait() is None


def test_reads_of_one_peer_end_in_their_order(make_end: MakeEnd, listen: Address) -> None:
    there = make_end(ArrayMemory(200).fill(), listen, name="there")
    here = make_end(ArrayMemory(200))
    ended: list[int] = []
    last = threading.Event()

    def read(index: int) -> None:
        size = 1 + index * 7 % 90
        here.connector.read(
            there.peer,
            blocks_of(there.memory, range(size)),
            range(size),
            lambda failure: (ended.append(index), last.set() if index == 59 else None)[0],
        )

    for index in range(60):
        read(index)
    assert last.wait(20)
    assert ended == list(range(60))


def test_several_readers_at_once_get_their_own_blocks(make_end: MakeEnd, listen: Address) -> None:
    there = make_end(ArrayMemory(300).fill(), listen, name="there")
    readers = [make_end(ArrayMemory(300), name=f"reader{index}") for index in range(4)]
    orders = [random.Random(index).sample(range(300), 300) for index in range(4)]
    outcomes: list[Outcome] = []
    for start in range(0, 300, 50):
        for reader, order in zip(readers, orders, strict=True):
            ids = order[start : start + 50]
            outcomes.append(reader.read(there.peer, blocks_of(there.memory, ids), ids))
    assert [outcome.wait() for outcome in outcomes] == [None] * len(outcomes)
    for reader in readers:
        assert np.array_equal(reader.memory.words, there.memory.words)


def test_two_ends_read_from_each_other(make_end: MakeEnd) -> None:
    left = make_end(ArrayMemory(80, owner=1).fill(), name="left")
    right = make_end(ArrayMemory(80, owner=2).fill(), name="right")
    outcomes = []
    for start in range(0, 40, 4):
        ids, into = range(start, start + 4), range(40 + start, 44 + start)
        outcomes.append(left.read(right.peer, blocks_of(right.memory, ids), into))
        outcomes.append(right.read(left.peer, blocks_of(left.memory, ids), into))
    assert [outcome.wait() for outcome in outcomes] == [None] * len(outcomes)
    assert np.array_equal(left.memory.words[40:], right.memory.words[:40])
    assert np.array_equal(right.memory.words[40:], left.memory.words[:40])


def test_a_stale_block_fails_its_read_and_no_other(make_end: MakeEnd, listen: Address) -> None:
    there = make_end(ArrayMemory(50, LARGE).fill(), listen, name="there")
    here = make_end(ArrayMemory(50, LARGE))
    wanted = blocks_of(there.memory, range(50))
    there.memory.hand_out(20)
    stale = here.read(there.peer, wanted, range(50))
    good = here.read(there.peer, wanted[:20], range(20))
    failure = stale.wait()
    assert failure is not None
    assert failure.stale
    assert "block 20 was given away: it has generation 2, not 1" in str(failure)
    assert good.wait() is None
    assert np.array_equal(here.memory.words[:20], there.memory.words[:20])


class MemoryThatMoves(ArrayMemory):
    """Gives a block away while it is being packed."""

    def __init__(self, victim: int) -> None:
        super().__init__(10)
        self._victim = victim

    def export_blocks(self, block_ids: Sequence[int], into: WireBuffer) -> None:
        super().export_blocks(block_ids, into)
        if self._victim in block_ids:
            self.hand_out(self._victim)


def test_a_block_given_away_during_the_read_is_stale(make_end: MakeEnd) -> None:
    memory = MemoryThatMoves(4)
    memory.fill()
    there = make_end(memory, name="there")
    here = make_end(ArrayMemory(10))
    failure = here.read(there.peer, blocks_of(memory, range(10))).wait()
    assert failure is not None
    assert failure.stale
    assert here.memory.imports == []


def test_no_read_succeeds_with_anothers_content(make_end: MakeEnd) -> None:
    """The owner gives blocks away all the time; what is read is whole and of the generation."""
    there = make_end(ArrayMemory(64, LARGE).fill(), name="there")
    here = make_end(ArrayMemory(64, LARGE))
    chance = random.Random(11)
    stop = threading.Event()

    def give_away() -> None:
        own_chance = random.Random(12)
        while not stop.wait(0.001):
            there.memory.hand_out(own_chance.randrange(64))

    thread = threading.Thread(target=give_away)
    thread.start()
    results = []
    try:
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            ids = chance.sample(range(64), chance.choice([1, 2, 9]))
            wanted = blocks_of(there.memory, ids)
            failure = here.read(there.peer, wanted, ids).wait()
            results.append(failure is None)
            if failure is None:
                for block in wanted:
                    expected = content_of(1, block.block_id, block.generation, LARGE)
                    found = here.memory.words[block.block_id]
                    assert np.array_equal(found, expected), f"{block} has another's content"
            else:
                assert failure.stale
    finally:
        stop.set()
        thread.join()
    assert any(results)
    assert not all(results)


class MemoryThatFails(ArrayMemory):
    def export_blocks(self, block_ids: Sequence[int], into: WireBuffer) -> None:
        raise MemoryError("no room to pack")

    def import_blocks(self, block_ids: Sequence[int], content: object) -> None:
        raise ValueError("no such place")


def test_blocks_that_cannot_be_packed_fail_the_read(make_end: MakeEnd) -> None:
    there = make_end(MemoryThatFails(4), name="there")
    here = make_end(ArrayMemory(4))
    failure = here.read(there.peer, [RemoteBlock(0, 0)]).wait()
    assert failure is not None
    assert not failure.stale
    assert "no room to pack" in str(failure)


def test_blocks_that_cannot_be_filled_fail_their_read_only(make_end: MakeEnd) -> None:
    there = make_end(ArrayMemory(4).fill(), name="there")
    here = make_end(MemoryThatFails(4))
    for _ in range(2):
        failure = here.read(there.peer, blocks_of(there.memory, range(4))).wait()
        assert failure is not None
        assert "no such place" in str(failure)


def test_ids_and_blocks_must_match_in_number(make_end: MakeEnd) -> None:
    here = make_end(ArrayMemory(4))
    with pytest.raises(ValueError, match="1 blocks cannot go into 2"):
        here.connector.read(Peer("x", "", "unix:/x"), [RemoteBlock(0, 1)], [0, 1], Outcome())


def test_certificates_protect_a_port(make_end: MakeEnd) -> None:
    there = make_end(ArrayMemory(30, LARGE).fill(), name="there", tls=WORKER)
    here = make_end(ArrayMemory(30, LARGE), tls=GATEWAY)
    ids = range(30)
    assert here.read(there.peer, blocks_of(there.memory, ids), ids).wait() is None
    assert np.array_equal(here.memory.words, there.memory.words)


def test_no_secret_on_either_end_will_do_on_one_host(make_end: MakeEnd, listen: Address) -> None:
    there = make_end(ArrayMemory(3).fill(), listen, name="there", secret=None)
    here = make_end(ArrayMemory(3), secret=None)
    assert here.read(there.peer, blocks_of(there.memory, range(3))).wait() is None


def test_a_port_for_other_hosts_needs_protection(make_end: MakeEnd) -> None:
    everywhere = TcpAddress("0.0.0.0", 0)
    with pytest.raises(InvalidRequest, match="give a cluster secret or certificates"):
        make_end(ArrayMemory(1), everywhere, secret=None)
    peer = make_end(ArrayMemory(1), everywhere, secret=SECRET).peer
    assert "0.0.0.0" not in peer.data
    assert not peer.data.endswith(":0")


def test_an_abandoned_socket_file_is_replaced_and_a_live_one_is_not(
    make_end: MakeEnd, tmp_path: Path
) -> None:
    address = unix_address(tmp_path, "there")
    first: End = make_end(ArrayMemory(1).fill(), address, name="first")
    with pytest.raises(OSError, match="in use"):
        make_end(ArrayMemory(1), address, name="second")
    here = make_end(ArrayMemory(1), LOOPBACK)
    assert here.read(first.peer, blocks_of(first.memory, [0])).wait() is None
    first.connector.close()
    assert not Path(address.path).exists()
    with socket.socket(socket.AF_UNIX) as abandoned:
        abandoned.bind(address.path)
    second = make_end(ArrayMemory(1).fill(), address, name="second")
    assert here.read(second.peer, blocks_of(second.memory, [0])).wait() is None
