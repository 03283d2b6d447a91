"""Faults that were reported of other engines, one test each.

E12, E13 and E14 are held in tests/cache, E33 by the state machines there and here.
"""

from __future__ import annotations

import pytest

from support.token_server import TokenServer
from twinfire.protocol.errors import InvalidRequest
from twinfire.scheduler.scheduler_config import SchedulerConfig
from twinfire.scheduler.sequence import Sequence, Status


def server(**limits: object) -> TokenServer:
    defaults: dict[str, object] = {
        "num_blocks": 64,
        "block_size": 4,
        "max_model_len": 200,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "watermark_blocks": 0,
    }
    return TokenServer(SchedulerConfig(**(defaults | limits)))


def prompt(number: int, num_tokens: int) -> list[int]:
    """Return a prompt that shares no block with those of other numbers."""
    return [number * 1000 + position for position in range(num_tokens)]


def pool_state(served: TokenServer) -> list[tuple[int, int, bytes | None]]:
    pool = served.scheduler.pool
    return [
        (pool.ref_count(block), pool.block_generation(block), pool.hash_of(block))
        for block in range(pool.num_blocks)
    ]


def test_e1_what_exceeds_the_pool_is_refused_and_blocks_nobody():
    served = server(num_blocks=8)
    with pytest.raises(InvalidRequest, match="9 KV blocks of 4; the limit is 8 blocks"):
        served.submit(prompt(0, 36), max_tokens=1)
    served.submit(prompt(1, 8), max_tokens=2)
    served.run(max_steps=2)


def test_e2_partial_prefills_never_block_each_other():
    served = server(num_blocks=15, max_num_batched_tokens=8, long_prefill_threshold=4)
    for number in range(6):
        served.submit(prompt(number, 38), max_tokens=3)
    served.run(max_steps=6 * (10 + 3))
    assert len(served.finished) == 6


def test_e2_a_partial_prefill_gives_its_blocks_to_an_older_sequence():
    served = server(num_blocks=10, max_num_batched_tokens=8)
    old = served.submit(prompt(0, 4), max_tokens=30)
    served.step()
    young = served.submit(prompt(1, 30), max_tokens=1)
    served.step()
    while not young.num_preemptions:
        assert old.num_preemptions == 0
        served.step()
    served.run()


def test_e3_a_victim_is_taken_out_of_the_plan_and_its_budget_given_back():
    served = server(num_blocks=4, policy="priority", max_num_batched_tokens=8, max_num_seqs=2)
    low = served.submit(prompt(0, 6), max_tokens=6, priority=5)
    served.step()
    high = served.submit(prompt(1, 8), max_tokens=6, priority=0)
    served.step()
    assert [low.status, high.status] == [Status.RUNNING, Status.RUNNING]
    while True:
        plan = served.launch()
        served.land(plan)
        if plan.preempted:
            break
    assert plan.preempted == [low]
    assert [piece.sequence for piece in plan.slices] == [high]
    served.run()


def test_e4_nobody_is_skipped_when_a_victim_leaves_the_middle():
    served = server(num_blocks=8, policy="priority", max_num_seqs=4, max_num_batched_tokens=32)
    sequences = [
        served.submit(prompt(number, 7), max_tokens=5, priority=priority)
        for number, priority in enumerate((0, 9, 1, 2))
    ]
    served.step()
    served.step()
    plan = served.step()
    assert plan.preempted == [sequences[1], sequences[3]]
    assert {piece.sequence for piece in plan.slices} == {sequences[0], sequences[2]}
    served.run()


def test_e6_sequences_complete_in_order_of_arrival_under_pressure():
    served = server(num_blocks=12, max_num_batched_tokens=16)
    submitted = [served.submit(prompt(number, 9), max_tokens=20) for number in range(8)]
    served.run()
    assert served.scheduler.num_preemptions > 0
    assert served.finished == submitted


@pytest.mark.parametrize("num_steps_before", [0, 1, 2, 5])
def test_e7_results_in_flight_of_a_preempted_sequence_are_dropped(num_steps_before):
    served = server(max_num_batched_tokens=8)
    sequence = served.submit(prompt(0, 10), max_tokens=8)
    for _ in range(num_steps_before):
        served.step()
    plan = served.launch()
    tokens = sequence.tokens.tolist()
    served.scheduler.preempt(sequence)
    served.land(plan)
    assert sequence.tokens.tolist() == tokens
    assert sequence.num_computed_tokens == 0
    served.run()
    assert served.finished == [sequence]


def test_e7_results_in_flight_do_not_reach_a_new_sequence_of_the_same_key():
    served = server()
    old = served.submit(prompt(0, 10), max_tokens=4)
    plan = served.launch()
    served.scheduler.abort(old.key)
    new = served.child_of(old, 0)
    served.scheduler.submit(new)
    served.land(plan)
    assert new.num_output_tokens == old.num_output_tokens == 0
    served.run()
    assert served.finished == [new]


def test_e8_preemption_neither_storms_nor_stops_progress():
    served = server(num_blocks=20, max_num_seqs=8)
    num_requests, num_prompt, num_output = 16, 9, 40
    for number in range(num_requests):
        served.submit(prompt(number, num_prompt), max_tokens=num_output)
    served.run()
    assert served.scheduler.num_preemptions <= 2 * num_requests
    useful = num_requests * (num_prompt + num_output - 1)
    assert served.model.num_computed_tokens <= 1.5 * useful
    assert all(plan.num_tokens for plan in served.plans)


def test_e9_a_failed_admission_changes_nothing():
    """Cached blocks that nobody holds are free, but not in addition to being a hit."""
    served = server(num_blocks=8)
    served.submit(prompt(0, 16), max_tokens=1)
    served.run()
    holder = served.submit(prompt(1, 15), max_tokens=2)
    served.step()
    newcomer = served.submit(prompt(0, 20), max_tokens=1)
    before = pool_state(served)
    hits, queries = served.scheduler.prefix_hits, served.scheduler.prefix_queries
    plan = served.launch()
    assert [piece.sequence for piece in plan.slices] == [holder]
    assert pool_state(served) == before
    assert (served.scheduler.prefix_hits, served.scheduler.prefix_queries) == (hits, queries)
    assert (newcomer.block_ids, newcomer.num_cached_tokens) == ([], None)
    served.land(plan)
    served.run()


def test_e10_a_prompt_that_is_cached_whole_recomputes_its_last_block():
    served = server()
    first = served.submit(prompt(0, 16), max_tokens=5)
    served.run()
    second = served.submit(prompt(0, 16), max_tokens=5)
    (piece,) = served.step().slices
    assert (piece.start, piece.num_tokens) == (12, 4)
    served.run()
    assert second.num_cached_tokens == 12
    assert second.tokens == first.tokens


def test_e11_a_hit_of_a_failed_attempt_is_not_remembered():
    served = server(num_blocks=8, max_num_seqs=4)
    served.submit(prompt(0, 12), max_tokens=1)
    served.run()
    holder = served.submit(prompt(1, 19), max_tokens=14)
    served.step()
    newcomer = served.submit(prompt(0, 16), max_tokens=2)
    served.step()
    assert newcomer.status is Status.WAITING
    while holder.status is not Status.FINISHED:
        served.step()
    served.run()
    assert newcomer.num_cached_tokens == 0, "the holder grew over the blocks found at first"


def test_e15_whoever_needs_all_prompt_rows_computes_them_and_still_fills_the_cache():
    served = server()
    for _ in range(2):
        scored = served.submit(prompt(0, 14), max_tokens=1, read_prefix_cache=False)
        (piece,) = served.step().slices
        assert (piece.start, piece.num_tokens) == (0, 14)
        assert scored.num_cached_tokens == 0
    assert served.scheduler.prefix_queries == 0
    reader = served.submit(prompt(0, 14), max_tokens=1)
    served.run()
    assert reader.num_cached_tokens == 12


def waiting(served: TokenServer) -> Sequence:
    return served.submit(prompt(0, 20), max_tokens=4)


def chunked(served: TokenServer) -> Sequence:
    sequence = waiting(served)
    served.step()
    assert 0 < sequence.num_computed_tokens < sequence.num_tokens
    return sequence


def decoding(served: TokenServer) -> Sequence:
    sequence = waiting(served)
    while not sequence.num_output_tokens:
        served.step()
    return sequence


def preempted(served: TokenServer) -> Sequence:
    sequence = decoding(served)
    served.scheduler.preempt(sequence)
    return sequence


def finished(served: TokenServer) -> Sequence:
    sequence = waiting(served)
    served.run()
    return sequence


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("reach", [waiting, chunked, decoding, preempted, finished])
def test_e34_an_abort_in_any_state_frees_each_block_once(reach, in_flight):
    served = server(max_num_batched_tokens=8)
    other = served.submit([1, 2, 3], max_tokens=12)
    sequence = reach(served)
    plan = served.launch() if in_flight else None
    num_free = served.scheduler.pool.num_free
    served.scheduler.abort(sequence.key)
    served.scheduler.check_integrity()
    assert sequence.status is Status.FINISHED
    if plan is not None:
        assert served.scheduler.pool.num_free == num_free, "the step may still use the blocks"
        served.land(plan)
    assert sequence.block_ids == []
    served.scheduler.check_integrity()
    served.run()
    assert other in served.finished
    assert served.scheduler.num_blocks_used == 0


def test_e34_an_abort_after_a_preemption_in_flight_frees_each_block_once():
    served = server(max_num_batched_tokens=8)
    sequence = decoding(served)
    plan = served.launch()
    served.scheduler.preempt(sequence)
    served.scheduler.abort(sequence.key)
    served.scheduler.check_integrity()
    served.land(plan)
    served.run()
    assert served.scheduler.num_blocks_used == 0
