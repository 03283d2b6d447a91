from __future__ import annotations

import pytest

from support.token_server import TokenServer
from twinfire.protocol.errors import InvalidRequest
from twinfire.scheduler.scheduler_config import SchedulerConfig
from twinfire.scheduler.sequence import Status
from twinfire.scheduler.step_plan import StepPlan


def server(**limits: object) -> TokenServer:
    defaults: dict[str, object] = {
        "num_blocks": 64,
        "block_size": 4,
        "max_model_len": 200,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
        "watermark_blocks": 0,
        "policy": "fcfs",
    }
    return TokenServer(SchedulerConfig(**(defaults | limits)))


def shape(plan: StepPlan) -> list[tuple[int, int, int]]:
    """Return (request, start, end) of each slice."""
    return [(piece.sequence.key[1], piece.start, piece.end) for piece in plan.slices]


def test_a_prompt_is_computed_in_chunks_of_the_budget_and_then_decoded():
    served = server(max_num_batched_tokens=8)
    served.submit(range(20), max_tokens=3)
    plans = [shape(served.step()) for _ in range(5)]
    assert plans == [[(1, 0, 8)], [(1, 8, 16)], [(1, 16, 20)], [(1, 20, 21)], [(1, 21, 22)]]
    assert served.scheduler.num_unfinished == 0
    assert shape(served.step()) == []


def test_waiting_sequences_share_what_is_left_of_the_budget_in_order_of_arrival():
    served = server(max_num_batched_tokens=16)
    for first_token in (0, 100, 200):
        served.submit(range(first_token, first_token + 10), max_tokens=2)
    assert shape(served.step()) == [(1, 0, 10), (2, 0, 6)]
    assert shape(served.step()) == [(1, 10, 11), (2, 6, 10), (3, 0, 10)]


def test_decodes_are_planned_before_prompt_chunks_that_run_already():
    """A long prompt must not take the budget from those who stream."""
    served = server(max_num_batched_tokens=8, max_num_seqs=4, long_prefill_threshold=4)
    served.submit(range(100), max_tokens=1)
    served.submit(range(200, 204), max_tokens=20)
    served.step()
    served.submit(range(300, 400), max_tokens=1)
    for _ in range(10):
        plan = served.step()
        assert shape(plan)[0][0] == 2, "the decode comes first"
        assert plan.slices[0].num_tokens == 1
        assert plan.num_tokens == 8


def test_a_chunk_is_capped_by_the_long_prefill_threshold():
    served = server(long_prefill_threshold=5)
    served.submit(range(12))
    assert [shape(served.step()) for _ in range(3)] == [[(1, 0, 5)], [(1, 5, 10)], [(1, 10, 12)]]


def test_beside_streams_prompts_take_no_more_than_their_limit_and_drafts_what_is_left():
    served = server(max_prompt_tokens_beside_streams=3)
    served.submit(range(10), max_tokens=30)
    assert shape(served.step()) == [(1, 0, 10)], "no stream runs"
    served.submit(range(100, 105), max_tokens=2)
    served.submit(range(200, 230), max_tokens=2)
    served.scheduler.decoding()[0].drafts = tuple(range(9))
    assert shape(served.step()) == [(1, 10, 20), (2, 0, 3)]
    assert shape(served.step())[1:] == [(2, 3, 5), (3, 0, 1)]
    assert shape(served.step())[2:] == [(3, 1, 4)]
    served.run()


def test_prompts_begun_are_continued_in_order_of_rank():
    served = server(policy="priority", long_prefill_threshold=12)
    served.submit(range(30), priority=1)
    served.submit(range(100, 130), priority=1)
    assert shape(served.step()) == [(1, 0, 12), (2, 0, 4)]
    served.submit(range(200, 203), max_tokens=1, priority=0)
    assert shape(served.step()) == [(3, 0, 3), (1, 12, 24), (2, 4, 5)]
    served.scheduler.preempt(served.plans[0].slices[0].sequence)
    assert [request for request, _, _ in shape(served.step())] == [1, 2]


def test_no_more_than_max_num_seqs_run():
    served = server(max_num_seqs=2)
    for first_token in (0, 100, 200):
        served.submit(range(first_token, first_token + 3), max_tokens=3)
    served.step()
    assert (served.scheduler.num_running, served.scheduler.num_waiting) == (2, 1)
    served.run()


def test_a_prompt_that_does_not_fit_whole_is_not_begun():
    served = server(num_blocks=8, max_num_batched_tokens=8, max_model_len=32)
    served.submit(range(16), max_tokens=8)
    served.step()
    served.submit(range(100, 120), max_tokens=1)
    for _ in range(3):
        assert {request for request, _, _ in shape(served.step())} == {1}
    served.run()
    assert served.scheduler.num_preemptions == 0


def test_blocks_that_a_begun_prompt_still_needs_are_not_given_to_newcomers():
    served = server(num_blocks=8, long_prefill_threshold=4, max_model_len=32)
    served.submit(range(20), max_tokens=1)
    served.submit(range(100, 108), max_tokens=1)
    served.submit(range(200, 208), max_tokens=1)
    assert shape(served.step()) == [(1, 0, 4), (2, 0, 4)]
    assert shape(served.step()) == [(1, 4, 8), (2, 4, 8)]
    assert served.scheduler.pool.num_free >= 3, "free, but promised"
    served.run()
    assert served.scheduler.num_preemptions == 0


def test_admission_leaves_the_watermark_free_except_to_a_lone_sequence():
    served = server(num_blocks=8, watermark_blocks=3, max_model_len=32)
    served.submit(range(16), max_tokens=4)
    served.submit(range(100, 108), max_tokens=1)
    served.step()
    assert served.scheduler.num_running == 1
    served.run()
    served.submit(range(200, 231), max_tokens=1)
    assert shape(served.step()) == [(3, 0, 16)]


def test_the_default_watermark_is_one_block_in_a_hundred():
    assert SchedulerConfig(num_blocks=250, max_model_len=8).watermark == 2


def test_priority_decides_who_is_admitted_and_arrival_among_equals():
    served = server(policy="priority", max_num_seqs=1)
    for priority in (2, 1, 0, 1):
        served.submit([priority, 5, 6], max_tokens=1, priority=priority)
    served.run()
    assert [sequence.key[1] for sequence in served.finished] == [3, 2, 4, 1]


def test_fcfs_ignores_priority():
    served = server(max_num_seqs=1)
    for priority in (2, 1, 0):
        served.submit([priority, 5, 6], max_tokens=1, priority=priority)
    served.run()
    assert [sequence.key[1] for sequence in served.finished] == [1, 2, 3]


def test_a_second_equal_prompt_is_a_hit_and_counted_as_one():
    served = server()
    first = served.submit(range(14), max_tokens=2)
    served.run()
    second = served.submit(range(14), max_tokens=2)
    assert shape(served.step()) == [(2, 12, 14)]
    served.run()
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 12)
    assert (served.scheduler.prefix_queries, served.scheduler.prefix_hits) == (28, 12)


def test_output_is_cached_too():
    served = server()
    first = served.submit(range(6), max_tokens=7)
    served.run()
    second = served.submit([*first.tokens, 1], max_tokens=1)
    served.run()
    assert second.num_cached_tokens == 12
    assert served.model.num_computed_tokens == 12 + 2


def test_the_prefix_cache_can_be_switched_off():
    served = server(enable_prefix_cache=False)
    for _ in range(2):
        sequence = served.submit(range(14))
        served.run()
        assert sequence.num_cached_tokens == 0
    assert served.scheduler.prefix_queries == 0


def test_recomputing_after_preemption_is_not_a_cache_hit_of_the_prompt():
    served = server()
    sequence = served.submit(range(14), max_tokens=4)
    served.step()
    served.scheduler.preempt(sequence)
    assert shape(served.step()) == [(1, 12, 15)]
    served.run()
    assert sequence.num_cached_tokens == 0
    assert sequence.num_preemptions == served.scheduler.num_preemptions == 1
    assert served.scheduler.prefix_hits == 0


def test_blocks_in_use_are_counted_without_cached_ones():
    served = server()
    served.submit(range(10), max_tokens=3)
    served.step()
    assert (served.scheduler.num_blocks_used, served.scheduler.num_blocks_total) == (3, 64)
    served.run()
    assert served.scheduler.num_blocks_used == 0


def test_drawn_tokens_past_the_budget_of_a_step_are_computed_in_later_ones():
    """A resumed sequence brings its output along and needs no special case."""
    served = server(max_num_batched_tokens=8)
    resumed = served.submit(range(6), max_tokens=12)
    served.step()
    served.step()
    output = resumed.tokens.tolist()
    served.scheduler.abort(resumed.key)
    again = served.child_of(resumed, 0)
    again.key = ("another gateway", 1, 0)
    again.tokens.extend(output[6:])
    again.cache_extra = resumed.cache_extra
    served.scheduler.submit(again)
    served.run()
    assert again.num_output_tokens == 12
    assert again.num_cached_tokens == 4


def test_sequences_are_found_by_key_until_they_end():
    served = server()
    sequence = served.submit(range(3))
    assert served.scheduler.get(sequence.key) is sequence
    served.run()
    assert served.scheduler.get(sequence.key) is None
    assert sequence.status is Status.FINISHED


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "param", "message"),
    [
        (30, 11, "max_tokens", r"needs 41 tokens \(30 prompt, 11 output\); the limit is 40"),
        (40, 1, "prompt", r"needs 41 tokens \(40 prompt, 1 output\); the limit is 40"),
        (30, 4, "max_tokens", r"which is 9 KV blocks of 4; the limit is 8 blocks"),
        (0, 4, "prompt", "the prompt is empty"),
    ],
)
def test_what_can_never_fit_is_refused_with_need_and_limit(
    prompt_tokens, max_tokens, param, message
):
    served = server(num_blocks=8, max_model_len=40)
    with pytest.raises(InvalidRequest, match=message) as caught:
        served.submit(range(prompt_tokens), max_tokens)
    assert caught.value.param == param
    assert served.scheduler.num_unfinished == 0
    served.scheduler.check_integrity()


def test_the_last_drawn_token_needs_no_block():
    served = server(num_blocks=8)
    served.submit(range(30), max_tokens=3)
    served.run()
    assert served.finished[0].num_tokens == 33


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_blocks", 0),
        ("max_model_len", 0),
        ("block_size", 0),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 7),
        ("long_prefill_threshold", 0),
        ("watermark_blocks", -1),
        ("policy", "lifo"),
    ],
)
def test_wrong_limits_are_named(field, value):
    with pytest.raises(ValueError, match=f"^{field} is .*{value}"):
        server(**{field: value})
