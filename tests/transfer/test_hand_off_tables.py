"""Leases, tombstones, the fair queue and fault points by themselves."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from support.hand_off_world import Clock
from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.messages import Peer, Submit
from twinfire.protocol.peer_messages import HandOffKey
from twinfire.protocol.sampling import SamplingParams
from twinfire.scheduler.prompt_turn import PromptClock, PromptTurn
from twinfire.transfer import tombstones
from twinfire.transfer.fair_queue import STARVING_S, FairQueue
from twinfire.transfer.fault_points import FaultPoints
from twinfire.transfer.hand_off_table import HandOffTable
from twinfire.transfer.lease import Leases
from twinfire.transfer.outgoing import Outgoing, Stage
from twinfire.transfer.tombstones import Tombstones

GREEDY = SamplingParams(max_tokens=1, seed=1)


def key(gateway_id: str, request_id: int) -> HandOffKey:
    return HandOffKey(gateway_id, request_id, 0)


def test_a_lease_ends_unless_it_is_renewed() -> None:
    clock = Clock()
    leases: Leases[str] = Leases(3.0, clock)
    leases.grant("a")
    leases.grant("b")
    clock.now_s = 2.0
    leases.renew(("a", "never granted"))
    clock.now_s = 3.0
    assert leases.ended() == ["b"]
    leases.release("b")
    clock.now_s = 5.0
    assert leases.ended() == ["a"]
    assert "never granted" not in leases


def test_tombstones_keep_the_first_outcome_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    stones = Tombstones(clock)
    stones.add(key("g", 0), "accepted")
    stones.add(key("g", 0), "aborted")
    assert stones.outcome(key("g", 0)) == "accepted"
    clock.now_s = tombstones.LIFETIME_S + 1
    stones.add(key("g", 1), "aborted")
    assert stones.outcome(key("g", 0)) is None
    monkeypatch.setattr(tombstones, "MAX_TOMBSTONES", 2)
    for request_id in range(2, 6):
        stones.add(key("g", request_id), "aborted")
    assert stones.outcome(key("g", 2)) is None
    assert stones.outcome(key("g", 5)) == "aborted"


def test_gateways_take_turns() -> None:
    queue, served = FairQueue(Clock()), []
    for request_id in range(3):
        queue.push(key("a", request_id), 0)
    queue.push(key("b", 0), 0)
    queue.push(key("b", 1), -1)

    def attempt(waiting: HandOffKey) -> bool:
        served.append((waiting.gateway_id, waiting.request_id))
        return True

    queue.serve(attempt)
    assert served == [("a", 0), ("b", 1), ("a", 1), ("b", 0), ("a", 2)]
    assert not len(queue)


def test_a_large_request_is_passed_only_for_a_while() -> None:
    clock = Clock()
    queue, served = FairQueue(clock), []
    for request_id in range(2):
        queue.push(key("a", request_id), 0)

    def attempt(waiting: HandOffKey) -> bool:
        if waiting.request_id == 0:
            return False
        served.append(waiting.request_id)
        return True

    queue.serve(attempt)
    assert served == [1]
    clock.now_s = STARVING_S + 0.1
    queue.push(key("a", 2), 0)
    queue.push(key("b", 3), 0)
    queue.serve(attempt)
    assert served == [1]
    queue.remove(key("a", 0))
    queue.serve(attempt)
    assert sorted(served) == [1, 2, 3]


@pytest.mark.parametrize(
    "text",
    ["nowhere=kill", "decode.step=explode", "decode.step=delay", "decode.step=kill:3", "x", "=@"],
)
def test_what_is_no_fault_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        FaultPoints(text)


def test_a_cut_happens_once_and_at_the_named_time(capfd: pytest.CaptureFixture[str]) -> None:
    cuts: list[str] = []
    points = FaultPoints(
        "decode.step=cut; sender.queued=cut@2;receiver.open=delay:0.05", lambda: cuts.append("cut")
    )
    for _ in range(3):
        points.hit("decode.step")
    assert len(cuts) == 1
    points.hit("sender.queued")
    assert len(cuts) == 1
    points.hit("sender.queued")
    assert len(cuts) == 2
    started_s = time.monotonic()
    points.hit("receiver.open")
    points.hit("receiver.open")
    assert time.monotonic() - started_s > 0.09
    points.hit("pull.finish")
    lines = capfd.readouterr().err.splitlines()
    assert [line.split()[2:4] for line in lines] == [
        ["decode.step", "cut"],
        ["sender.queued", "cut"],
        ["receiver.open", "delay"],
        ["receiver.open", "delay"],
    ]


def test_a_kill_is_logged_before_it_happens() -> None:
    program = (
        "from twinfire.transfer.fault_points import FaultPoints;"
        "FaultPoints('decode.step=kill').hit('decode.step')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert b"twinfire fault decode.step kill hit=1" in done.stderr


def outgoing(gateway_id: str, request_id: int, peer: Peer, deadline_s: float) -> Outgoing:
    submit = Submit(request_id, b"", GREEDY)
    turn = PromptTurn(PromptClock(), 1)
    return Outgoing(key(gateway_id, request_id), submit, peer, deadline_s, 1, turn)


def test_a_table_tells_what_is_open_silent_and_overdue() -> None:
    clock = Clock()
    table: HandOffTable[Outgoing] = HandOffTable(3.0, clock)
    left, right = Peer("left", ""), Peer("right", "")
    first, second, third = (
        outgoing("g", 1, left, 9.0),
        outgoing("g", 2, left, 1.0),
        outgoing("h", 1, right, 9.0),
    )
    for one in (first, second, third):
        table.add(one)
        table.grant_lease(one.key)
    assert table.renewals() == {}
    first.stage = third.stage = Stage.OPEN
    assert table.renewals() == {"left": (first.key,), "right": (third.key,)}
    assert table.of_request("g", 1) == [first]
    assert table.of_peer("left") == [first, second]
    clock.now_s = 2.0
    assert table.overdue() == [second]
    table.renew((third.key,))
    clock.now_s = 3.0
    # Whoever ends the first takes along what else its silent peer had.
    for one in table.silent():
        assert one is first
        for lost in table.of_peer(one.peer.instance_id):
            table.remove(lost.key)
    assert list(table) == [third]
    clock.now_s = 5.0
    assert list(table.silent()) == [third]
    assert list(table.silent()) == []
