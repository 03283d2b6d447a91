"""Sequences that wait a step because another one computes their prefix in it."""

from __future__ import annotations

from support.token_server import TokenServer
from twinfire.scheduler.scheduler_config import SchedulerConfig


def server(**limits: object) -> TokenServer:
    defaults: dict[str, object] = {
        "num_blocks": 64,
        "block_size": 4,
        "max_model_len": 100,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "policy": "fcfs",
    }
    return TokenServer(SchedulerConfig(**(defaults | limits)))


def planned(served: TokenServer) -> list[int]:
    return [piece.sequence.key[1] for piece in served.step().slices]


def test_a_burst_of_one_prompt_computes_it_once():
    served = server()
    for last_token in range(5):
        served.submit([*range(12), 100 + last_token], max_tokens=2)
    assert planned(served) == [1]
    assert planned(served) == [1, 2, 3, 4, 5]
    served.run()
    assert served.model.num_computed_tokens == 13 + 4 * 1 + 5
    assert served.scheduler.prefix_hits == 4 * 12


def test_a_long_shared_prompt_is_followed_through_all_its_chunks():
    served = server(max_num_batched_tokens=10)
    for last_token in (100, 101):
        served.submit([*range(40), last_token])
    assert [planned(served) for _ in range(4)] == [[1]] * 4
    assert planned(served) == [1, 2]
    served.run()
    assert served.model.num_computed_tokens == 41 + 1


def test_later_arrivals_that_share_nothing_are_not_held_up():
    served = server()
    for prompt in ([*range(12)], [*range(12), 1], [50, 51, 52]):
        served.submit(prompt)
    assert planned(served) == [1, 3]
    assert planned(served) == [2]


def test_no_step_is_lost_when_less_than_a_block_is_shared():
    served = server()
    served.submit([1, 2, 3, 4, 5, 6])
    served.submit([1, 2, 3, 9, 5, 6])
    served.submit([1, 2, 3, 4])
    assert planned(served) == [1, 2, 3], "the last would have to compute its only block anyway"


def test_a_chunk_that_ends_inside_the_block_delays_nobody():
    served = server(long_prefill_threshold=3)
    served.submit(range(10))
    served.submit([*range(9), 99])
    assert planned(served) == [1, 2]


def test_others_salts_delay_nobody():
    served = server()
    served.submit(range(12), extra=b"a")
    served.submit(range(12), extra=b"b")
    assert planned(served) == [1, 2]


def test_a_sequence_that_may_not_read_the_cache_does_not_wait_for_it():
    served = server()
    served.submit(range(12))
    served.submit(range(12), read_prefix_cache=False)
    assert planned(served) == [1, 2]


def test_nobody_waits_with_the_cache_switched_off():
    served = server(enable_prefix_cache=False)
    served.submit(range(12))
    served.submit(range(12))
    assert planned(served) == [1, 2]


def test_waiting_for_one_that_is_aborted_ends_at_once():
    served = server(max_num_batched_tokens=8)
    first = served.submit(range(20))
    served.submit([*range(20), 1])
    assert planned(served) == [1]
    served.scheduler.abort(first.key)
    assert planned(served) == [2]
    served.run()


def test_a_stream_of_newcomers_with_the_same_prefix_starves_nobody():
    """Who waits for a prefix stays ahead of those who came later and want it too."""
    served = server(max_num_batched_tokens=8, max_num_seqs=3)
    served.submit([*range(24), 100])
    delayed = served.submit([*range(24), 101, 102], max_tokens=1)
    for newcomer in range(12):
        served.submit([*range(24), 200 + newcomer], max_tokens=4)
        served.step()
    assert delayed in served.finished[:2]
    served.run()


def test_a_delayed_sequence_keeps_its_place_when_places_are_few():
    served = server(max_num_seqs=2)
    served.submit(range(12), max_tokens=5)
    served.submit([*range(12), 1], max_tokens=5)
    served.submit([50, 51, 52], max_tokens=5)
    assert planned(served) == [1]
    assert planned(served) == [1, 2]
