"""Both sides of a hand-off against each other, with everything that can be lost on the way."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.hand_off_world import LEASE_S, World
from twinfire.engine.hand_off import HandOffEnded
from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.messages import Peer, Reserve, Submit
from twinfire.protocol.peer_messages import Abort, ChunkReady, Done, HandOffKey, Open, Ticket
from twinfire.protocol.sampling import SamplingParams
from twinfire.protocol.tokens import pack_generations, pack_ids

ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("request"), st.integers(1, 30), st.booleans()),
        st.tuples(st.just("cancel"), st.integers(0, 6)),
        st.tuples(st.just("deliver"), st.booleans()),
        st.tuples(st.just("settle")),
        st.tuples(st.just("step")),
        st.tuples(st.just("steps")),
        st.tuples(st.just("read"), st.sampled_from([False, False, False, True])),
        st.tuples(st.just("preempt")),
        st.tuples(st.just("cut")),
        st.tuples(st.just("freeze"), st.sampled_from("pd")),
        st.tuples(st.just("thaw")),
        st.tuples(st.just("time"), st.sampled_from([0.1, 0.6, 1.1, 3.5])),
        st.tuples(st.just("finish")),
    ),
    max_size=60,
)


def act(world: World, action: tuple, num_requests: int) -> int:
    match action:
        case ("request", num_tokens, reserve):
            world.request(num_requests, num_tokens, reserve=reserve, n=1 + num_requests % 2)
            return num_requests + 1
        case ("cancel", request_id):
            if request_id < num_requests:
                world.cancel(request_id)
        case ("deliver", to_decode):
            world.deliver(to_decode=to_decode)
        case ("settle",):
            world.settle()
        case ("step",):
            world.step()
        case ("steps",):
            for _ in range(5):
                world.settle()
                world.step()
        case ("read", broken):
            if "d" not in world.frozen:
                world.reader.end_one(broken=broken)
        case ("preempt",):
            world.prefill.preempt()
        case ("cut",):
            world.cut()
        case ("freeze", worker):
            world.frozen.add(worker)
        case ("thaw",):
            for worker in list(world.frozen):
                world.thaw(worker)
        case ("time", seconds):
            world.pass_time(seconds)
        case ("finish",):
            world.decode.finish()
    return num_requests


@settings(max_examples=400, deadline=None)
@given(ACTIONS, st.integers(0, 3), st.booleans(), st.integers(0, 1000))
def test_every_hand_off_ends_once_and_leaves_nothing(
    actions: list[tuple], num_cached: int, checksums: bool, seed: int
) -> None:
    world = World(num_cached=num_cached, checksums=checksums, prefill_blocks=9, decode_blocks=9)
    num_requests = 0
    for action in actions:
        num_requests = act(world, action, num_requests)
    world.run_down(Random(seed))
    world.check_nothing_left()
    for request_id in range(num_requests):
        ends = world.gateway.ends[request_id]
        assert ends.count("accepted") <= 1
        if ends[0] == "accepted":
            assert set(ends) <= {"accepted", "cancelled", "failed"}, ends


def opened(world: World) -> list[int]:
    """Return the requests that the decode worker was asked to make room for, and let it do so."""
    asked = [one.key.request_id for one in world.to_decode.queue if isinstance(one, Open)]
    world.settle()
    return asked


def test_a_short_prompt_is_opened_past_long_ones_and_computed_before_their_rest() -> None:
    world = World(prefill_blocks=200, decode_blocks=200)
    for request_id in range(4):
        world.request(request_id, 80)
    world.sender.pump()
    assert opened(world) == [0, 1], "one is computed and one is ready"
    world.step()
    world.request(4, 8)
    world.request(5, 80, num_uncached=8)
    world.sender.pump()
    assert opened(world) == [], "they have waited for nothing yet"
    for _ in range(4):
        world.step()
    world.sender.pump()
    assert opened(world) == [4, 5], "a prompt that is all but cached is a short one"
    for _ in range(2):
        world.step()
    world.settle()
    while world.reader.open:
        world.reader.end_one()
    assert world.gateway.ends == {4: ["accepted"]}


def test_a_prompt_crosses_block_by_block_while_it_is_computed() -> None:
    world = World()
    world.request(0, 14)
    world.settle()
    for _ in range(3):
        world.step()
        world.settle()
        world.reader.end_one()
    assert world.gateway.reserved == [0]
    assert world.gateway.ends == {}
    world.step()
    world.settle()
    world.reader.end_one()
    assert world.gateway.ends == {0: ["accepted"]}
    world.settle()
    assert not world.prefill.prompts, "the decode worker said that it is done"
    world.decode.finish()
    world.check_nothing_left()


def test_first_tokens_that_make_no_sense_end_the_hand_off_alone() -> None:
    world = World()
    world.decode.refuses_first_tokens = True
    world.request(0, 4)
    for _ in range(3):
        world.settle()
        world.step()
        world.settle()
        world.reader.end_one()
    assert world.gateway.ends == {0: ["failed"]}
    world.settle()
    world.check_nothing_left()


def test_blocks_that_the_decode_worker_has_are_not_read() -> None:
    world = World(num_cached=2)
    world.request(0, 14)
    world.settle()
    for _ in range(4):
        world.step()
    world.settle()
    assert sum(len(read.local_ids) for read in world.reader.open) == 2


@pytest.mark.parametrize("is_early", [True, False], ids=["open first", "reserve first"])
def test_either_half_may_come_first(is_early: bool) -> None:
    world = World()
    world.request(0, 5, reserve=not is_early)
    world.settle()
    if is_early:
        assert not world.decode.reserved
        submit = Submit(0, pack_ids([0, 0, 1, 2, 3]), SamplingParams(max_tokens=4, seed=1))
        world.receiver.reserve("g", Reserve(submit, "p"))
    assert len(world.decode.reserved) == 1


def test_an_open_that_nobody_announced_is_aborted() -> None:
    world = World()
    world.request(0, 5, reserve=False)
    world.settle()
    world.pass_time(1.5)
    assert world.gateway.ends == {0: ["failed"]}
    world.check_nothing_left()


def test_a_full_decode_worker_does_not_hold_up_what_fits() -> None:
    world = World(decode_blocks=6)
    world.request(0, 16)
    world.request(1, 24)
    world.request(2, 8)
    for _ in range(8):
        world.settle()
        world.pass_time(0.1)
        world.step()
        world.reader.end_one()
    assert 2 in world.gateway.reserved
    assert 1 not in world.gateway.reserved
    world.run_down(Random(0))
    assert {request_id: ends[-1] for request_id, ends in world.gateway.ends.items()} == {
        0: "accepted",
        1: "accepted",
        2: "accepted",
    }


def test_a_prefill_worker_without_blocks_gives_way() -> None:
    """Two workers that send prompts to each other would wait for each other's blocks."""
    world = World(prefill_blocks=8, decode_blocks=24)
    held = world.prefill.blocks.take(7)
    assert held is not None
    world.request(0, 16)
    world.request(1, 16)
    for _ in range(5):
        world.settle()
        world.step()
        world.pass_time(0.1)
    assert set(world.gateway.reserved) >= {0, 1}, "both hold blocks of the decode worker"
    for _ in range(12):
        world.settle()
        world.step()
        world.pass_time(0.1)
    assert 1 in world.gateway.ends
    assert 0 not in world.gateway.ends, "one at a time, the last one first"
    world.prefill.blocks.give_back(held)
    world.run_down(Random(0))
    assert world.gateway.ends[0][-1] == "accepted"


def test_a_prompt_that_never_fits_is_refused_at_once() -> None:
    world = World(decode_blocks=3)
    world.request(0, 30)
    world.settle()
    assert world.gateway.ends == {0: ["rejected"]}
    world.check_nothing_left()


def test_a_prompt_whose_request_is_at_fault_is_refused_and_not_tried_again() -> None:
    world = World()
    world.request(0, 14)
    world.settle()
    world.step()
    (prompt,) = world.prefill.prompts
    refusal = InvalidRequest("the grammar leaves no token to draw", "allowed_token_ids")
    world.prefill.events.append(HandOffEnded(prompt.key, refusal.message, refusal))
    world.step()
    world.run_down(Random(0))
    assert world.gateway.ends == {0: ["rejected"]}
    world.check_nothing_left()


def test_a_preempted_prompt_is_announced_and_read_again() -> None:
    world = World()
    world.request(0, 14)
    world.settle()
    world.step()
    world.step()
    world.settle()
    world.prefill.preempt()
    world.reader.end_one()
    world.reader.end_one()
    assert world.gateway.ends == {}
    world.run_down(Random(0))
    assert world.gateway.ends == {0: ["accepted"]}


def test_a_stale_block_that_is_not_announced_again_is_a_failure() -> None:
    world = World()
    world.request(0, 14)
    world.settle()
    world.step()
    world.settle()
    world.prefill.preempt()
    world.reader.end_one()
    world.pass_time(LEASE_S + 1)
    assert world.gateway.ends == {0: ["failed"]}
    world.check_nothing_left()


def test_blocks_are_not_freed_while_a_read_may_write_them() -> None:
    world = World()
    world.request(0, 14)
    world.settle()
    world.step()
    world.settle()
    world.cancel(0)
    world.settle()
    assert len(world.decode.blocks.free) < world.decode.blocks.num_blocks
    assert not world.prefill.prompts
    world.reader.end_one()
    world.check_nothing_left()


def test_changed_content_is_noticed_by_its_checksum() -> None:
    world = World(checksums=True)
    world.request(0, 5)
    world.settle()
    world.step()
    world.step()
    world.settle()
    world.reader.end_one()
    (_, taken) = next(iter(world.decode.reserved.values()))
    world.decode.blocks.content[taken[0]] = (b"flipped", 0)
    world.reader.end_one()
    assert world.gateway.ends == {0: ["failed"]}
    world.settle()
    world.check_nothing_left()


def test_a_silent_peer_ends_with_the_lease() -> None:
    world = World()
    world.request(0, 14)
    world.settle()
    world.step()
    world.frozen.add("d")
    world.pass_time(LEASE_S + 1)
    assert world.gateway.ends == {0: ["failed"]}
    assert not world.prefill.prompts
    world.thaw("d")
    world.settle()
    world.check_nothing_left()


def test_late_messages_of_a_hand_off_that_is_over_are_answered() -> None:
    world = World()
    world.request(0, 4)
    world.run_down(Random(0))
    peer, key = Peer("p", "mem:p"), HandOffKey("g", 0, 0)
    world.receiver.received(peer, ChunkReady(key, 0, pack_ids([1]), pack_generations([1])))
    assert list(world.to_prefill.queue) == [Done(key)]
    world.to_prefill.queue.clear()
    unknown = HandOffKey("g", 9, 0)
    world.receiver.received(peer, ChunkReady(unknown, 0, b"", b""))
    assert isinstance(world.to_prefill.queue.popleft(), Abort)
    world.sender.received(Peer("d", "mem:d"), Ticket(unknown, 0))
    assert isinstance(world.to_decode.queue.popleft(), Abort)


def test_another_worker_cannot_open_or_feed_a_hand_off() -> None:
    world = World()
    world.request(0, 8)
    world.settle()
    stranger, key = Peer("x", "mem:x"), HandOffKey("g", 0, 0)
    world.receiver.received(stranger, ChunkReady(key, 0, pack_ids([1]), pack_generations([1])))
    world.receiver.received(stranger, Abort(key, "malice"))
    assert len(world.decode.reserved) == 1
    world.receiver.received(stranger, Open(HandOffKey("g", 5, 0), 3))
    world.run_down(Random(0))
    assert world.gateway.ends[0] == ["accepted"]


def test_blocks_outside_the_prompt_end_the_hand_off_alone() -> None:
    world = World()
    world.request(0, 8)
    world.request(1, 8)
    world.settle()
    key = HandOffKey("g", 0, 0)
    bad = ChunkReady(key, 1 << 40, pack_ids([1]), pack_generations([1]))
    world.receiver.received(Peer("p", "mem:p"), bad)
    world.run_down(Random(0))
    assert world.gateway.ends == {0: ["failed"], 1: ["accepted"]}
    world.check_nothing_left()


def test_a_request_whose_time_is_over_ends_on_both_sides() -> None:
    world = World(decode_blocks=4)
    world.request(0, 16)
    world.request(1, 16, timeout_s=2.0)
    world.settle()
    world.pass_time(2.5)
    assert "failed" in world.gateway.ends[1]
    world.run_down(Random(0))
    world.check_nothing_left()
