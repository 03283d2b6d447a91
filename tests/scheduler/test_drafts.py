"""Drafts take what nobody else needs, and only those that were drawn stay computed."""

from __future__ import annotations

from collections.abc import Iterator

from support.token_model import naive_tokens
from support.token_server import TokenServer
from twinfire.scheduler.scheduler_config import SchedulerConfig
from twinfire.scheduler.sequence import Sequence
from twinfire.scheduler.step_plan import StepPlan


def server(**limits: int) -> TokenServer:
    defaults = {
        "num_blocks": 64,
        "block_size": 4,
        "max_model_len": 200,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
        "watermark_blocks": 0,
    }
    return TokenServer(SchedulerConfig(**(defaults | limits)))


def truth(sequence: Sequence, count: int) -> tuple[int, ...]:
    """Return the next tokens that the sequence will draw."""
    return tuple(naive_tokens(sequence.tokens.tolist(), 0, count)[sequence.num_tokens :])


def lengths(plan: StepPlan) -> dict[int, tuple[int, int]]:
    """Return each request's (tokens, drafts) of a plan."""
    return {piece.sequence.key[1]: (piece.num_tokens, len(piece.drafts)) for piece in plan.slices}


def decoding(served: TokenServer, *lengths: int, max_tokens: int = 40) -> Iterator[Sequence]:
    """Submit prompts and compute them."""
    sequences = [
        served.submit(range(100 * index, 100 * index + length), max_tokens)
        for index, length in enumerate(lengths)
    ]
    while any(one.num_output_tokens == 0 for one in sequences):
        served.step()
    return iter(sequences)


def test_accepted_drafts_are_tokens_and_rejected_ones_were_never_there():
    served = server()
    (sequence,) = decoding(served, 5)
    right = truth(sequence, 3)
    num_tokens = sequence.num_tokens
    sequence.drafts = (*right, 999, 998)
    assert lengths(served.step()) == {1: (6, 5)}
    # The drafts, and the token after them, which nobody has computed.
    assert sequence.num_tokens == num_tokens + 4
    assert sequence.num_computed_tokens == sequence.num_tokens - 1
    assert sequence.drafts == ()
    served.run()


def test_a_draft_is_for_one_step():
    served = server()
    (sequence,) = decoding(served, 5)
    sequence.drafts = (999,)
    assert lengths(served.step()) == {1: (2, 1)}
    assert lengths(served.step()) == {1: (1, 0)}


def test_every_token_that_is_certain_has_its_place_before_any_draft():
    served = server(max_num_batched_tokens=10)
    first, second = decoding(served, 3, 3)
    served.submit(range(500, 512))
    first.drafts = second.drafts = (1, 2, 3, 4, 5)
    assert lengths(served.step()) == {1: (1, 0), 2: (1, 0), 3: (8, 0)}
    first.drafts = second.drafts = (1, 2, 3)
    # The prompt's last 4 tokens leave 3 for the first and 1 for the second.
    assert lengths(served.step()) == {1: (4, 3), 2: (2, 1), 3: (4, 0)}
    served.run()


def test_prompts_that_cannot_begin_are_not_expected_in_the_next_step():
    served = server(max_num_seqs=2)
    decoding(served, 3, 3)
    served.submit(range(500, 530))
    assert served.scheduler.num_prefill_tokens_waiting == 30
    assert served.scheduler.num_prompt_tokens_next == 0

    served = server(num_blocks=10)
    decoding(served, 8, max_tokens=20)
    served.submit(range(500, 534), max_tokens=2)
    assert served.scheduler.num_prompt_tokens_next == 0

    served = server()
    decoding(served, 8)
    served.submit(range(500, 530))
    assert served.scheduler.num_prompt_tokens_next == 30
    served.step()
    assert served.scheduler.num_prompt_tokens_next == 15
    served.submit([*range(8), 1, 2, 3])
    # Two blocks of the first prompt are found again.
    assert served.scheduler.num_prompt_tokens_next == 15 + 3


def test_drafts_take_no_block_that_a_running_prompt_still_needs():
    served = server(num_blocks=10, long_prefill_threshold=4)
    (sequence,) = decoding(served, 4, max_tokens=20)
    served.submit(range(300, 330), max_tokens=2)
    served.step()
    room = len(sequence.block_ids) * 4 - sequence.num_tokens
    sequence.drafts = truth(sequence, 7)
    plan = served.step()
    assert lengths(plan)[1] == (1 + room, room)
    assert not plan.preempted
    served.run()


def test_room_is_kept_ahead_for_a_drafter_while_blocks_are_to_spare():
    served = server(num_lookahead_tokens=8)
    (sequence,) = decoding(served, 4)
    served.step()
    assert len(sequence.block_ids) * 4 >= sequence.num_computed_tokens + 8


def test_blocks_that_drafts_filled_are_found_by_others():
    served = server()
    (sequence,) = decoding(served, 6)
    sequence.drafts = truth(sequence, 8)
    served.step()
    assert sequence.num_computed_tokens == 15
    other = served.submit(sequence.tokens[:15], max_tokens=1)
    served.step()
    assert other.num_cached_tokens == 12
    served.run()


def test_a_block_that_only_drafts_would_fill_keeps_nobody_waiting():
    """Who waits for a prefix in flight must not wait for one that may never be."""
    served = server()
    (sequence,) = decoding(served, 6)
    sequence.drafts = (999,) * 6
    other = served.submit([*range(6), 5, 999, 999], max_tokens=1)
    assert 2 in lengths(served.step())
    assert other.num_tokens >= 9
    served.run()
