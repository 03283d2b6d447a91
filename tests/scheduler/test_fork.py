"""Several choices after one prompt."""

from __future__ import annotations

import pytest

from support.token_model import draw, naive_tokens
from support.token_server import TokenServer
from twinfire.protocol.errors import InvalidRequest
from twinfire.scheduler.scheduler_config import SchedulerConfig
from twinfire.scheduler.sequence import Sequence, Status


def server(**limits: object) -> TokenServer:
    defaults: dict[str, object] = {
        "num_blocks": 32,
        "block_size": 4,
        "max_model_len": 60,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "watermark_blocks": 0,
    }
    return TokenServer(SchedulerConfig(**(defaults | limits)))


def parent_with_prompt_done(served: TokenServer, prompt_tokens: int) -> Sequence:
    parent = served.submit(range(prompt_tokens), max_tokens=6)
    served.step()
    return parent


def fork(served: TokenServer, parent: Sequence, choice: int, with_token: bool = True) -> Sequence:
    child = served.child_of(parent, choice)
    if with_token:
        child.tokens.append(draw(served.model.last_prompt_value(parent), choice))
    served.scheduler.fork(parent, child)
    served.scheduler.check_integrity()
    return child


@pytest.mark.parametrize("prompt_tokens", [1, 3, 4, 9, 12])
def test_the_prompt_is_computed_once_for_all_choices(prompt_tokens):
    served = server()
    served.submit(range(prompt_tokens), max_tokens=6, num_forks=3)
    served.run()
    assert len(served.finished) == 4
    assert len({tuple(sequence.tokens) for sequence in served.finished}) == 4
    assert served.model.num_computed_tokens == prompt_tokens + 4 * 5


def test_full_blocks_are_shared_and_the_tail_is_copied():
    served = server()
    parent = parent_with_prompt_done(served, 10)
    child = fork(served, parent, 1)
    assert child.status is Status.RUNNING
    assert child.block_ids[:2] == parent.block_ids[:2]
    assert child.block_ids[2] != parent.block_ids[2]
    assert served.scheduler.num_blocks_used == 4
    assert served.launch().block_copies == [(parent.block_ids[2], child.block_ids[2])]


def test_nothing_is_copied_when_the_prompt_fills_its_blocks():
    served = server()
    parent = parent_with_prompt_done(served, 8)
    child = fork(served, parent, 1)
    assert child.block_ids == parent.block_ids[:2]
    assert served.launch().block_copies == []


def test_a_child_without_a_token_computes_the_last_prompt_token_in_its_own_block():
    served = server()
    parent = parent_with_prompt_done(served, 8)
    child = fork(served, parent, 1, with_token=False)
    assert child.block_ids[0] == parent.block_ids[0]
    assert child.block_ids[1] != parent.block_ids[1]
    served.run()
    assert child.num_output_tokens == 6


def test_the_copied_block_outlives_a_parent_that_ends_before_the_copy():
    served = server(num_blocks=4, max_model_len=16)
    parent = parent_with_prompt_done(served, 6)
    source = parent.block_ids[1]
    child = fork(served, parent, 1)
    served.scheduler.finish(parent)
    served.submit([*range(20, 23)])
    assert served.scheduler.pool.ref_count(source) == 1
    plan = served.launch()
    assert plan.block_copies == [(source, child.block_ids[1])]
    assert all(source not in piece.sequence.block_ids for piece in plan.slices)
    served.land(plan)
    assert served.scheduler.pool.ref_count(source) == 0
    served.run()


def test_the_copied_block_outlives_a_parent_that_is_preempted_before_the_copy():
    served = server()
    parent = parent_with_prompt_done(served, 6)
    fork(served, parent, 1)
    served.scheduler.preempt(parent)
    served.run()
    assert len(served.finished) == 2


@pytest.mark.parametrize("end", ["abort", "preempt"])
def test_a_copy_is_dropped_with_its_child(end):
    served = server()
    parent = parent_with_prompt_done(served, 6)
    child = fork(served, parent, 1)
    if end == "abort":
        served.scheduler.abort(child.key)
    else:
        served.scheduler.preempt(child)
    served.scheduler.check_integrity()
    assert served.scheduler.pool.ref_count(parent.block_ids[1]) == 1
    assert served.launch().block_copies == []


def test_a_child_aborted_while_its_copy_is_made_leaks_nothing():
    served = server()
    parent = parent_with_prompt_done(served, 6)
    child = fork(served, parent, 1)
    plan = served.launch()
    served.scheduler.abort(child.key)
    served.scheduler.abort(parent.key)
    served.scheduler.check_integrity()
    served.land(plan)
    assert served.scheduler.num_blocks_used == 0


def test_a_child_of_a_child_copies_from_where_the_content_is():
    served = server()
    parent = parent_with_prompt_done(served, 6)
    child = fork(served, parent, 1)
    grandchild = served.child_of(child, 2)
    served.scheduler.fork(child, grandchild)
    sources = {source for source, _ in served.launch().block_copies}
    assert sources == {parent.block_ids[1]}


def test_a_child_shares_the_prompt_but_none_of_the_parents_output():
    served = server()
    parent = parent_with_prompt_done(served, 6)
    for _ in range(4):
        served.step()
    child = served.child_of(parent, 1)
    child.tokens.extend(naive_tokens([*range(6)], 1, 4)[6:])
    served.scheduler.fork(parent, child)
    assert child.num_computed_tokens == 6
    served.run()
    assert len(served.finished) == 2


def test_children_without_a_place_wait_and_start_from_the_cached_prompt():
    served = server(max_num_seqs=2)
    served.submit(range(10), max_tokens=4, num_forks=3)
    served.step()
    assert (served.scheduler.num_running, served.scheduler.num_waiting) == (2, 2)
    served.run()
    assert [sequence.key[2] for sequence in served.finished] == [0, 1, 2, 3]
    assert served.scheduler.prefix_queries == 10, "the prompt counts once"


def test_children_without_blocks_wait_and_nothing_is_taken():
    served = server(num_blocks=4, max_model_len=17)
    parent = parent_with_prompt_done(served, 11)
    used = served.scheduler.num_blocks_used
    children = [fork(served, parent, choice) for choice in (1, 2)]
    assert [child.status for child in children] == [Status.RUNNING, Status.WAITING]
    assert served.scheduler.num_blocks_used == used + 1
    served.run()
    assert len(served.finished) == 3


def test_children_leave_the_watermark_free():
    served = server(num_blocks=6, max_model_len=16, watermark_blocks=2)
    parent = parent_with_prompt_done(served, 6)
    statuses = [fork(served, parent, choice).status for choice in (1, 2, 3)]
    assert statuses == [Status.RUNNING, Status.RUNNING, Status.WAITING]
    served.run()


def test_waiting_children_go_before_later_requests_and_in_order():
    served = server(max_num_seqs=1, policy="fcfs")
    parent = served.submit(range(5), max_tokens=2, num_forks=2)
    served.submit([7, 7], max_tokens=1)
    served.run()
    keys = [sequence.key[1:] for sequence in served.finished]
    assert keys == [(1, 0), (1, 1), (1, 2), (2, 0)]
    assert parent.status is Status.FINISHED


def test_a_child_of_a_parent_that_is_gone_waits_like_a_new_request():
    served = server()
    parent = parent_with_prompt_done(served, 10)
    served.scheduler.finish(parent)
    child = fork(served, parent, 1)
    assert child.status is Status.WAITING
    served.run()
    assert served.finished == [child]


def test_a_child_reports_the_cached_tokens_of_its_request():
    served = server()
    served.submit(range(10), max_tokens=1)
    served.run()
    parent = served.submit(range(10), max_tokens=3, num_forks=1)
    served.run()
    assert [one.num_cached_tokens for one in served.finished[1:]] == [8, 8]
    assert parent in served.finished


def test_a_child_that_can_never_fit_is_refused():
    served = server()
    parent = parent_with_prompt_done(served, 10)
    child = served.child_of(parent, 1)
    child.max_total_tokens = 61
    with pytest.raises(InvalidRequest, match="the limit is 60"):
        served.scheduler.fork(parent, child)
    served.scheduler.check_integrity()


def test_a_fork_of_another_prompt_is_a_bug():
    served = server()
    parent = parent_with_prompt_done(served, 10)
    child = served.child_of(parent, 1)
    child.tokens[3] += 1
    with pytest.raises(AssertionError, match="its parent's prompt"):
        served.scheduler.fork(parent, child)
