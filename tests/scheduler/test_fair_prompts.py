"""Short prompts pass long ones, and no prompt is passed for longer than it takes itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from support.token_server import TokenServer
from twinfire.scheduler.prompt_clock import START_TOKENS
from twinfire.scheduler.scheduler_config import SchedulerConfig
from twinfire.scheduler.sequence import Sequence
from twinfire.scheduler.step_plan import StepPlan


def server(**limits: object) -> TokenServer:
    defaults: dict[str, object] = {
        "num_blocks": 1000,
        "block_size": 4,
        "max_model_len": 1000,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 32,
        "watermark_blocks": 0,
    }
    return TokenServer(SchedulerConfig(**(defaults | limits)))


def shape(plan: StepPlan) -> list[tuple[int, int, int]]:
    return [(piece.sequence.key[1], piece.start, piece.end) for piece in plan.slices]


def prompt(name: int, length: int) -> list[int]:
    return [name, *range(1, length)]


def test_a_short_prompt_is_computed_before_the_rest_of_a_long_one():
    served = server()
    served.submit(prompt(100, 300))
    served.step()
    served.submit(prompt(200, 20))
    assert shape(served.step()) == [(2, 0, 20), (1, 32, 44)]
    served.run()


def test_in_the_order_of_arrival_it_waits():
    served = server(policy="fcfs")
    served.submit(prompt(100, 300))
    served.step()
    served.submit(prompt(200, 20))
    assert shape(served.step()) == [(1, 32, 64)]


def test_a_long_one_that_would_be_done_first_is_not_passed():
    served = server()
    served.submit(prompt(100, 100))
    for _ in range(3):
        served.step()
    served.submit(prompt(200, 40))
    assert shape(served.step()) == [(1, 96, 100), (2, 0, 28)]


def test_of_those_that_wait_the_shortest_goes_first():
    served = server(max_num_seqs=1)
    for length in (90, 30, 60, 30):
        served.submit(prompt(length, length))
    served.run()
    assert [sequence.key[1] for sequence in served.finished] == [2, 4, 3, 1]


def test_what_is_cached_does_not_count():
    served = server()
    served.submit(prompt(100, 200))
    served.run()
    served.submit(prompt(300, 150))
    served.submit([*prompt(100, 200), 7, 8, 9])
    assert shape(served.step()) == [(3, 200, 203), (2, 0, 29)]


def test_prompts_that_are_all_but_cached_do_not_pass_for_ever():
    served = server(max_num_seqs=2, max_num_batched_tokens=8)
    served.submit(prompt(100, 200))
    served.run()
    long = served.submit(prompt(300, 400))
    num_passed = 0
    while long.num_output_tokens == 0:
        served.submit([*prompt(100, 200), num_passed % 5], max_tokens=1)
        num_passed += 1
        served.step()
    assert long not in served.scheduler._line.waiting
    assert num_passed < 400 // 4 + 400 // START_TOKENS + 10


def test_the_choices_of_a_request_share_its_turn():
    served = server(max_num_seqs=2)
    served.submit(prompt(100, 64), max_tokens=4, num_forks=3)
    served.step()
    served.step()
    served.submit(prompt(200, 500), max_tokens=1)
    served.run()
    assert [sequence.key[1] for sequence in served.finished] == [1, 1, 1, 1, 2]


def test_a_request_of_higher_priority_goes_before_the_rest_of_a_prompt_that_has_begun():
    served = server(policy="priority")
    served.submit(prompt(100, 300), priority=1)
    served.step()
    served.submit(prompt(200, 100), priority=0)
    assert shape(served.step()) == [(2, 0, 32)]
    served.run()


def test_a_short_prompt_waits_for_the_step_of_a_long_one_that_computes_its_prefix():
    served = server()
    served.submit(prompt(100, 300))
    served.step()
    served.submit([*prompt(100, 50), 0])
    # Blocks 8 to 11 of the long prompt are its own, too: one step later they are cached.
    assert shape(served.step()) == [(1, 32, 64)]
    assert shape(served.step())[0] == (2, 48, 51)


@given(
    arrivals=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 120)), min_size=2, max_size=25)
)
def test_nobody_who_comes_after_a_prompts_own_length_was_computed_goes_before_it(arrivals):
    served = server()
    computed = 0
    came_at: dict[Sequence, int] = {}

    def step() -> None:
        nonlocal computed
        unfinished = [one for one in came_at if one.num_output_tokens == 0]
        plan = served.launch()
        planned = {piece.sequence: piece.end for piece in plan.slices}
        for late in planned.keys() & set(unfinished):
            for early in unfinished:
                own_length = early.num_prompt_tokens + START_TOKENS
                if came_at[late] - came_at[early] >= own_length:
                    assert planned.get(early) == early.num_prompt_tokens, "it was passed too late"
        prompts = [p for p in plan.slices if p.sequence in unfinished]
        computed += sum(piece.num_tokens for piece in prompts)
        computed += START_TOKENS * sum(piece.start == 0 for piece in prompts)
        served.land(plan)

    for number, (num_steps, length) in enumerate(arrivals):
        for _ in range(num_steps):
            step()
        came_at[served.submit(prompt(1000 + number, length))] = computed
    while served.scheduler.num_unfinished:
        step()
