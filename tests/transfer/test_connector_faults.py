"""Peers that die, freeze, are cut off or are somebody else: reads fail once, soon and clearly."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from support.array_memory import LARGE, ArrayMemory
from support.connector_ends import (
    LOOPBACK,
    End,
    MakeEnd,
    Outcome,
    blocks_of,
    first_life,
    unix_address,
)
from support.cutting_proxy import cutting_proxy
from support.serving_connector import serving_process
from support.tls_files import GATEWAY, STRANGER, WORKER
from twinfire.protocol.addresses import Address, parse_address
from twinfire.protocol.messages import Peer
from twinfire.protocol.worker_config import ConnectorKind, TlsFiles
from twinfire.transfer.connector import ReadFailed

MANY = range(64)


def failure_of(outcome: Outcome, timeout_s: float = 20) -> ReadFailed:
    failure = outcome.wait(timeout_s)
    assert failure is not None, "the read succeeded"
    assert not failure.stale
    return failure


def keep_reading(here: End, peer: Peer, seconds: float) -> list[Outcome]:
    """Ask for many blocks again and again, so that something is always under way."""
    outcomes = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        outcomes.append(here.read(peer, first_life(MANY), MANY))
        time.sleep(0.01)
    return outcomes


def test_a_killed_peer_fails_its_reads_and_its_successor_is_somebody_else(
    make_end: MakeEnd, kind: ConnectorKind, listen: Address
) -> None:
    here = make_end(ArrayMemory(64, LARGE))
    with serving_process(kind, listen, name="first", size="large") as first:
        assert here.read(first.peer, first_life(MANY), MANY).wait() is None
        outcomes = keep_reading(here, first.peer, 0.2)
        first.send_signal(signal.SIGKILL)
        outcomes.append(here.read(first.peer, first_life(MANY), MANY))
        results = [outcome.wait() for outcome in outcomes]
        assert results[-1] is not None
        first.kill()
        address = parse_address(first.peer.data)
        with serving_process(kind, address, name="second", owner=8, size="large") as second:
            assert second.peer.data == first.peer.data
            failure = failure_of(here.read(first.peer, first_life([0])))
            assert "another worker now than the one that was meant" in str(failure)
            assert here.read(second.peer, first_life(MANY), MANY).wait() is None
            assert np.array_equal(here.memory.words, second.expected.words)


def test_a_frozen_peer_fails_its_reads_and_can_write_nothing_later(
    make_end: MakeEnd, kind: ConnectorKind, listen: Address
) -> None:
    here = make_end(ArrayMemory(64, LARGE), timeout_s=0.5)
    with serving_process(kind, listen, size="large") as there:
        assert here.read(there.peer, first_life(MANY), MANY).wait() is None
        outcomes = keep_reading(here, there.peer, 0.1)
        there.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        outcomes += [here.read(there.peer, first_life(MANY), MANY) for _ in range(3)]
        for outcome in outcomes[-3:]:
            assert re.search(r"(said|brought) nothing for", str(failure_of(outcome)))
        assert time.monotonic() - started < 5
        here.memory.words[:] = 0
        num_imports = len(here.memory.imports)
        there.send_signal(signal.SIGCONT)
        time.sleep(0.3)
        assert len(here.memory.imports) == num_imports
        assert not here.memory.words.any()
        assert here.read(there.peer, first_life(MANY), MANY).wait() is None
        assert np.array_equal(here.memory.words, there.expected.words)
        assert all(len(outcome.calls) == 1 for outcome in outcomes)


def test_a_frozen_peer_holds_up_no_other(
    make_end: MakeEnd, kind: ConnectorKind, listen: Address
) -> None:
    # Long enough that a busy machine reads from the other one meanwhile.
    here = make_end(ArrayMemory(64), timeout_s=4.0)
    other = make_end(ArrayMemory(64).fill(), name="other")
    with serving_process(kind, listen) as frozen:
        assert here.read(frozen.peer, first_life([0])).wait() is None
        frozen.send_signal(signal.SIGSTOP)
        stuck = here.read(frozen.peer, first_life(range(30)), range(30))
        ids = range(30, 60)
        assert here.read(other.peer, blocks_of(other.memory, ids), ids).wait(1) is None
        assert not stuck.is_known
        failure_of(stuck)


@pytest.mark.parametrize("limit", [60, 700, 950, 1_500, 100_000, 6_000_000])
def test_a_link_that_is_cut_fails_its_reads(
    make_end: MakeEnd, kind: ConnectorKind, limit: int
) -> None:
    """60 bytes end in the introduction, the others between and within replies."""
    if kind == "nixl" and limit > 1_500:
        limit = 1_000 + limit % 997  # Its links carry no content.
    there = make_end(ArrayMemory(64, LARGE).fill(), name="there")
    here = make_end(ArrayMemory(64, LARGE))
    with cutting_proxy(there.peer, limit) as proxy:
        outcomes = [here.read(proxy.peer, first_life(MANY), MANY) for _ in range(5)]
        results = [outcome.wait() for outcome in outcomes]
        assert results[-1] is not None
        proxy.limit = None
        assert here.read(proxy.peer, first_life(MANY), MANY).wait() is None
    assert np.array_equal(here.memory.words, there.memory.words)
    assert all(len(outcome.calls) == 1 for outcome in outcomes)


def test_a_link_cut_while_idle_is_made_anew(make_end: MakeEnd) -> None:
    there = make_end(ArrayMemory(8).fill(), name="there")
    here = make_end(ArrayMemory(8))
    with cutting_proxy(there.peer) as proxy:
        assert here.read(proxy.peer, first_life([0])).wait() is None
        proxy.cut()
        time.sleep(0.2)
        assert here.read(proxy.peer, first_life([1])).wait() is None
        assert proxy.num_links == 2


@pytest.mark.parametrize("limit", [0, 60, 1200])
def test_a_silent_peer_fails_its_reads_in_time(make_end: MakeEnd, limit: int) -> None:
    there = make_end(ArrayMemory(64).fill(), name="there")
    here = make_end(ArrayMemory(64), timeout_s=0.4)
    with cutting_proxy(there.peer, limit, "stall") as proxy:
        for block_id in MANY:  # Enough replies for any limit.
            here.read(proxy.peer, first_life([block_id]))
        started = time.monotonic()
        failure_of(here.read(proxy.peer, first_life(MANY)))
        assert time.monotonic() - started < 3


def test_forgetting_a_peer_fails_its_reads_at_once(make_end: MakeEnd) -> None:
    there = make_end(ArrayMemory(64).fill(), name="there")
    here = make_end(ArrayMemory(64), timeout_s=30)
    with cutting_proxy(there.peer, end="stall") as proxy:
        assert here.read(proxy.peer, first_life(MANY)).wait() is None
        proxy.limit = 0
        outcomes = [here.read(proxy.peer, first_life(MANY)) for _ in range(3)]
        time.sleep(0.1)
        started = time.monotonic()
        here.connector.forget("there")
        for outcome in outcomes:
            assert "worker there is gone" in str(failure_of(outcome))
        assert time.monotonic() - started < 2
        here.connector.forget("there")
        here.connector.forget("nobody")
    assert here.read(there.peer, first_life(MANY)).wait() is None


def test_closing_fails_what_is_open_and_whatever_comes_later(make_end: MakeEnd) -> None:
    there = make_end(ArrayMemory(64).fill(), name="there")
    here = make_end(ArrayMemory(64), timeout_s=30)
    with cutting_proxy(there.peer, end="stall") as proxy:
        assert here.read(proxy.peer, first_life(MANY)).wait() is None
        proxy.limit = 0
        stuck = here.read(proxy.peer, first_life(MANY))
        time.sleep(0.1)
        started = time.monotonic()
        here.connector.close()
        assert time.monotonic() - started < 2
        failure_of(stuck)
        failure_of(here.read(there.peer, first_life([0])))
        here.connector.close()


def test_a_callback_may_close_the_connector(make_end: MakeEnd) -> None:
    there = make_end(ArrayMemory(1).fill(), name="there")
    here = make_end(ArrayMemory(1))
    outcome = Outcome()

    def close(failure: ReadFailed | None) -> None:
        here.connector.close()
        outcome(failure)

    here.connector.read(there.peer, first_life([0]), [0], close)
    assert outcome.wait() is None


def test_a_callback_that_fails_ends_nothing_else(make_end: MakeEnd) -> None:
    there = make_end(ArrayMemory(1).fill(), name="there")
    here = make_end(ArrayMemory(1))

    def fail(failure: ReadFailed | None) -> None:
        raise ValueError("from the callback")

    here.connector.read(there.peer, first_life([0]), [0], fail)
    assert here.read(there.peer, first_life([0])).wait() is None


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("tcp:127.0.0.1:1", "cannot connect: Connection refused"),
        ("unix:/nowhere/at/all", "cannot connect: No such file"),
        ("nonsense", "is no address"),
        ("", "is no address"),
    ],
)
def test_a_peer_that_is_not_there_is_named(make_end: MakeEnd, address: str, reason: str) -> None:
    here = make_end(ArrayMemory(1))
    assert reason in str(failure_of(here.read(Peer("gone", "", address), first_life([0]))))


@pytest.mark.parametrize(
    ("theirs", "reason"),
    [
        (b"another secret of others", "closed the link during the handshake"),
        (None, "this end has a cluster secret and the other one has none"),
    ],
)
def test_a_peer_of_another_cluster_is_not_read(
    make_end: MakeEnd, listen: Address, theirs: bytes | None, reason: str
) -> None:
    there = make_end(ArrayMemory(1).fill(), listen, name="there", secret=theirs)
    here = make_end(ArrayMemory(1))
    assert reason in str(failure_of(here.read(there.peer, first_life([0]))))


@pytest.mark.parametrize(
    ("here_tls", "there_tls"),
    [(None, WORKER), (GATEWAY, None), (STRANGER, WORKER), (GATEWAY, STRANGER)],
    ids=["none-here", "none-there", "stranger-here", "stranger-there"],
)
def test_certificates_of_one_authority_are_needed_on_both_ends(
    make_end: MakeEnd, here_tls: TlsFiles | None, there_tls: TlsFiles | None
) -> None:
    there = make_end(ArrayMemory(1).fill(), name="there", tls=there_tls)
    here = make_end(ArrayMemory(1), tls=here_tls, timeout_s=2)
    failure_of(here.read(there.peer, first_life([0])))
    assert not here.memory.imports


def test_a_peer_with_other_blocks_is_not_read(make_end: MakeEnd) -> None:
    there = make_end(ArrayMemory(1).fill(), name="there")
    here = make_end(ArrayMemory(1, LARGE))
    failure = failure_of(here.read(there.peer, first_life([0])))
    assert "different blocks: target:30:3:64:bf16;32 here, target:2:2:8:bf16" in str(failure)


def test_asking_for_blocks_that_do_not_exist_costs_the_link_only(make_end: MakeEnd) -> None:
    there = make_end(ArrayMemory(4).fill(), name="there")
    here, other = make_end(ArrayMemory(4)), make_end(ArrayMemory(4), name="other")
    assert other.read(there.peer, first_life([0])).wait() is None
    failure_of(here.read(there.peer, first_life([4])))
    assert other.read(there.peer, first_life([1])).wait() is None
    assert here.read(there.peer, first_life([3])).wait() is None


def held_by_this_process() -> tuple[int, int]:
    """Descriptors and threads."""
    descriptors, threads = (os.listdir(f"/proc/self/{kind}") for kind in ("fd", "task"))
    return len(descriptors), len(threads)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts through /proc")
def test_many_deaths_leave_nothing_behind(
    make_end: MakeEnd, kind: ConnectorKind, tmp_path: Path
) -> None:
    here = make_end(ArrayMemory(8), LOOPBACK)

    def live_and_die(index: int) -> None:
        name = f"life{index}"
        there = End(kind, ArrayMemory(8).fill(), unix_address(tmp_path, name), name=name)
        assert here.read(there.peer, first_life([1])).wait() is None
        there.connector.close()
        here.connector.forget(name)

    live_and_die(0)
    time.sleep(0.2)
    before = held_by_this_process()
    for index in range(1, 6):
        live_and_die(index)
    until = time.monotonic() + 5
    while max(now - then for now, then in zip(held_by_this_process(), before, strict=True)) > 0:
        assert time.monotonic() < until, f"{held_by_this_process()} instead of {before}"
        time.sleep(0.05)
