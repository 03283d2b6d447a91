"""Short prompts pass long ones, and whoever has waited longest for its length is never passed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from support.token_server import TokenServer
from twinfire.scheduler.prompt_turn import START_TOKENS, PromptTurn
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
    plan = served.launch()
    served.submit(prompt(200, 20))
    served.land(plan)
    assert shape(served.step()) == [(2, 0, 20), (1, 32, 44)]
    served.run()


def test_in_the_order_of_arrival_it_waits():
    served = server(policy="fcfs")
    served.submit(prompt(100, 300))
    served.step()
    served.submit(prompt(200, 20))
    assert shape(served.step()) == [(1, 32, 64)]


def test_one_that_is_all_but_done_is_not_passed():
    served = server()
    served.submit(prompt(100, 100))
    served.step()
    served.step()
    plan = served.launch()
    served.submit(prompt(200, 20))
    served.land(plan)
    assert shape(served.step()) == [(1, 96, 100), (2, 0, 20)]


def test_one_that_has_waited_longer_for_its_length_is_not_passed():
    served = server()
    served.submit(prompt(100, 300))
    served.submit(prompt(200, 80))
    served.step()
    # The second has waited 32 tokens for its 80 when the third comes.
    served.submit(prompt(300, 79))
    assert shape(served.step()) == [(2, 0, 32)]


def test_under_overload_short_prompts_wait_no_longer_for_their_length_than_long_ones():
    served = server(num_blocks=10_000, max_num_seqs=32)
    for number in range(8):
        served.submit(prompt(100 + number, 600))
    for _ in range(60):
        served.step()
    short = served.submit(prompt(400, 20))
    num_steps = 0
    while short.num_output_tokens == 0:
        served.step()
        num_steps += 1
    # Those that wait have been slowed down by three times their length, so it is, too; at most
    # twice as much, for one that has begun.
    assert 3 * (20 + START_TOKENS) < num_steps * 32 < 8 * (20 + START_TOKENS)


def test_of_those_that_wait_the_shortest_goes_first():
    served = server(max_num_seqs=1)
    served.submit(prompt(500, 32))
    for length in (90, 30, 60, 30):
        served.submit(prompt(length, length))
    served.run()
    assert [sequence.key[1] for sequence in served.finished] == [1, 3, 5, 4, 2]


def test_what_is_cached_does_not_count():
    served = server()
    served.submit(prompt(100, 200))
    served.run()
    served.submit(prompt(500, 32))
    served.submit(prompt(300, 150))
    served.submit([*prompt(100, 200), 7, 8, 9])
    served.step()
    assert shape(served.step()) == [(4, 200, 203), (3, 0, 29)]


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
    assert num_passed < 2 * 400 // 8


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


def test_one_that_is_waited_for_goes_on_in_the_place_of_who_waits():
    served = server(policy="priority")
    served.submit(prompt(100, 300), priority=9)
    served.step()
    for number in range(8):
        served.submit(prompt(200 + number, 100), priority=5)
    served.submit([*prompt(100, 100), 0], priority=0)
    # Blocks 8 to 24 of the first are those of the last, which goes before the others.
    assert shape(served.step()) == [(1, 32, 64)]
    assert shape(served.step()) == [(1, 64, 96)]
    assert shape(served.step())[0] == (1, 96, 128)
    assert shape(served.step())[0] == (10, 100, 101)


def test_a_turn_that_is_told_wrongly_harms_nobody():
    served = server()
    odd = PromptTurn(served.scheduler._clock, -START_TOKENS)
    served.submit(prompt(100, 300))
    plan = served.launch()
    sequence = served.submit(prompt(200, 20))
    sequence.turn = odd
    served.land(plan)
    served.run()
    assert len(served.finished) == 2


@given(
    arrivals=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 120)), min_size=2, max_size=25)
)
def test_nobody_goes_before_one_that_has_waited_longer_for_its_length(arrivals):
    served = server(enable_prefix_cache=False)
    computed = 0
    came_at: dict[Sequence, int] = {}

    def left(one: Sequence) -> int:
        return one.num_prompt_tokens - one.num_computed_tokens

    def step() -> None:
        nonlocal computed
        unfinished = [one for one in came_at if one.num_output_tokens == 0]
        order = {
            one: (
                -(computed - came_at[one])
                / (max(left(one), one.num_prompt_tokens / 2) + START_TOKENS),
                one.arrival,
            )
            for one in unfinished
        }
        plan = served.launch()
        ends = {piece.sequence: piece.end for piece in plan.slices if piece.sequence in order}
        for planned in ends:
            for other in unfinished:
                if order[other] < order[planned]:
                    assert ends.get(other) == other.num_prompt_tokens, "it was passed"
        computed += sum(
            piece.num_tokens
            for piece in plan.slices
            if piece.start < piece.sequence.num_prompt_tokens
        )
        served.land(plan)

    for number, (num_steps, length) in enumerate(arrivals):
        for _ in range(num_steps):
            step()
        came_at[served.submit(prompt(1000 + number, length))] = computed
    while served.scheduler.num_unfinished:
        step()
