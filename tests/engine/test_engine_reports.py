"""What an engine says of itself: load, cache events, progress, and who has run out of time."""

from __future__ import annotations

import pytest

from support.engines import SAMPLER, Collector, mock_engine
from support.mock_runner import MockRunner
from support.two_engines import DECODE, GATEWAY, TwoEngines
from twinfire.engine.engine import Engine
from twinfire.engine.hand_off import BlocksComputed, HandOffEnded
from twinfire.engine.step_report import GatewayOutput
from twinfire.kernels.step_batch import StepBatch
from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.messages import ChoiceDelta, Preempted, PromptDone, Submit
from twinfire.protocol.peer_messages import HandOffKey
from twinfire.protocol.sampling import SamplingParams
from twinfire.protocol.tokens import pack_ids, unpack_ids
from twinfire.scheduler.scheduler import Scheduler
from twinfire.scheduler.scheduler_config import SchedulerConfig


def sampling(**kw: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 8, "seed": 5, **kw})  # type: ignore[arg-type]


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class TimedRunner(MockRunner):
    """Takes 10 ms and 1 ms for each token, by the clock that its engine reads."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(block_size=4)
        self.init_kv(200)
        self.clock = clock
        self.delay_s = 0.0

    def execute(self, batch: StepBatch) -> None:
        super().execute(batch)
        self.clock.now_s += 0.010 + 0.001 * batch.num_tokens + self.delay_s


def timed_engine() -> tuple[Engine, TimedRunner, Clock]:
    clock = Clock()
    runner = TimedRunner(clock)
    config = SchedulerConfig(
        num_blocks=200, max_model_len=400, block_size=4, max_num_seqs=8, max_num_batched_tokens=90
    )
    return Engine(Scheduler(config), runner, SAMPLER, clock), runner, clock


def test_rates_are_medians_of_steps_of_their_kind() -> None:
    engine, runner, _ = timed_engine()
    assert (engine.load().prefill_tokens_per_s, engine.load().decode_step_s) == (0.0, 0.0)
    collector = Collector(engine)
    # Three full steps and a last one of 30 tokens, too short to tell.
    collector.submit(1, list(range(60)) * 5, sampling(max_tokens=30))
    for _ in range(4):
        collector.step()
    assert engine.load().prefill_tokens_per_s == pytest.approx(90 / 0.100)
    runner.delay_s = 5.0
    collector.step()
    runner.delay_s = 0.0
    collector.run()
    assert engine.load().decode_step_s == pytest.approx(0.011)


def test_waiting_prompt_tokens_are_told() -> None:
    engine, _, _ = timed_engine()
    for request_id in (3, 2):
        engine.submit("g", Submit(request_id, pack_ids([1] * 100), sampling()))
    assert engine.load().prefill_tokens_waiting == 200
    engine.step()
    assert engine.load().prefill_tokens_waiting == 110


def test_a_request_is_ended_when_its_time_is_over_running_or_queued() -> None:
    engine, _, clock = timed_engine()
    collector = Collector(engine)
    collector.submit(1, [1, 2, 3], sampling(n=2, max_tokens=50), timeout_s=5.0)
    collector.step()
    collector.submit(2, [1, 2, 3], sampling(max_tokens=3), timeout_s=50.0)
    collector.submit(3, [1, 2, 3], sampling(), timeout_s=0.0)
    clock.now_s += 5.0
    collector.run()
    ends = {
        request_id: {
            answer.finish_reason for answer in collector.record("g", request_id).answers.values()
        }
        for request_id in (1, 2, 3)
    }
    assert ends == {1: {"timeout"}, 2: {"length"}, 3: {"timeout"}}
    assert len(collector.record("g", 1).answers[0].tokens) > 0
    assert collector.record("g", 3).answers[0].tokens == []


def test_an_earlier_request_of_the_same_id_does_not_end_a_later_one() -> None:
    engine, _, clock = timed_engine()
    collector = Collector(engine)
    engine.submit("g", Submit(1, pack_ids([1]), sampling(), timeout_s=1.0))
    engine.cancel("g", 1)
    clock.now_s += 0.5
    collector.submit(1, [1], sampling(max_tokens=100), timeout_s=9.0)
    clock.now_s += 1.0
    collector.run()
    assert collector.record("g", 1).answers[0].finish_reason == "length"


def test_a_prompt_for_another_worker_that_runs_out_of_time_is_ended_there() -> None:
    engine, _, clock = timed_engine()
    engine.submit("g", Submit(1, pack_ids([1] * 200), sampling(), hand_off=DECODE, timeout_s=1.0))
    assert list(engine.step()) == ["g"]
    clock.now_s += 1.0
    assert engine.step() == {}
    assert isinstance(engine.take_hand_off_events()[-1], HandOffEnded)
    engine.check_integrity()
    assert engine.load().kv_blocks_used == 0


def progress_of(output: GatewayOutput) -> list[tuple[int, int]]:
    return [(one.request_id, one.num_computed_tokens) for one in output.progress]


def test_progress_counts_cached_tokens_and_is_told_once_for_each_request() -> None:
    engine, _ = mock_engine(max_num_batched_tokens=16)
    prompt = list(range(30))
    collector = Collector(engine)
    collector.submit(1, prompt[:9], sampling(max_tokens=1))
    collector.run()
    engine.submit("g", Submit(2, pack_ids(prompt), sampling(n=2, max_tokens=4)))
    steps = [progress_of(engine.step()["g"]) for _ in range(3)]
    assert steps == [[(2, 24)], [(2, 30)], []]
    engine.cancel("g", 2)


def test_the_furthest_of_resumed_choices_is_the_progress_of_their_prompt() -> None:
    engine, _ = mock_engine(max_num_batched_tokens=40, enable_prefix_cache=False)
    outputs = pack_ids([1]), pack_ids([2])
    params = sampling(n=2, max_tokens=4)
    message = Submit(3, pack_ids(range(30)), params, choices=(0, 1), outputs=outputs)
    engine.submit("g", message)
    assert progress_of(engine.step()["g"]) == [(3, 31)]


def test_a_prompt_preempted_before_it_is_done_is_told_for_each_of_its_choices() -> None:
    engine, _ = mock_engine(
        num_blocks=9, max_model_len=36, max_num_batched_tokens=2, max_num_seqs=2
    )
    engine.submit("g", Submit(1, pack_ids([1] * 7), sampling(max_tokens=25)))
    for _ in range(4):
        engine.step()
    engine.submit("g", Submit(2, pack_ids(list(range(24))), sampling(n=3, max_tokens=2)))
    preempted: list[Preempted] = []
    while not preempted:
        preempted += engine.step()["g"].preempted
    # All that it had computed is still cached but what the other one took.
    assert {(one.request_id, one.choice) for one in preempted} == {(2, 0), (2, 1), (2, 2)}
    assert len({one.num_tokens for one in preempted}) == 1
    assert 0 < preempted[0].num_tokens < 24


def test_a_preempted_prompt_for_another_worker_is_announced_anew() -> None:
    engine, _ = mock_engine(
        num_blocks=9, max_model_len=36, max_num_batched_tokens=2, max_num_seqs=2
    )
    engine.submit("g", Submit(1, pack_ids([1] * 7), sampling(max_tokens=25)))
    for _ in range(4):
        engine.step()
    message = Submit(2, pack_ids(list(range(24))), sampling(max_tokens=2), hand_off=DECODE)
    engine.submit("g", message)
    announced: list[BlocksComputed] = []
    while engine.has_work:
        for output in engine.step().values():
            assert output.preempted == []
        engine.check_integrity()
        events = engine.take_hand_off_events()
        announced += [event for event in events if isinstance(event, BlocksComputed)]
    assert engine.load().preemptions > 0
    firsts = [event.first_block for event in announced]
    assert firsts.count(0) == 2
    latest: dict[int, tuple[int, int]] = {}
    for event in announced:
        for index, block in enumerate(zip(event.block_ids, event.generations, strict=True)):
            latest[event.first_block + index] = block
    assert sorted(latest) == list(range(6))
    for block_id, generation in latest.values():
        assert engine.block_generation(block_id) == generation


def test_cache_events_are_exact_and_a_cleared_cache_is_empty() -> None:
    engine, _ = mock_engine(num_blocks=16, max_model_len=64)
    collector = Collector(engine)
    collector.submit(1, list(range(40)), sampling(max_tokens=1))
    collector.submit(2, list(range(40)), sampling(max_tokens=1), cache_salt="other")
    collector.run()
    stored, removed = engine.take_cache_events()
    assert sorted(stored) == sorted(engine.cached_hashes())
    assert removed == []
    assert engine.take_cache_events() == ([], [])
    # What comes and goes between two calls is not told.
    collector.submit(3, list(range(20, 60)), sampling(max_tokens=1))
    collector.run()
    engine.clear_prefix_cache()
    assert engine.cached_hashes() == []
    again, removed = engine.take_cache_events()
    assert again == []
    assert sorted(removed) == sorted(stored)


def test_another_attempt_may_come_while_the_last_ones_blocks_are_still_written() -> None:
    engine, _ = mock_engine()
    first = Submit(1, pack_ids([1] * 10), sampling(), attempt=0, hand_off=DECODE)
    second = Submit(1, pack_ids([1] * 10), sampling(), attempt=1)
    assert engine.reserve("g", first) is not None
    assert engine.reserve("g", second) is not None
    engine.release_reservation(HandOffKey("g", 1, 1))
    collector = Collector(engine)
    engine.submit("g", second)
    collector.step()
    engine.check_integrity()
    with pytest.raises(InvalidRequest, match="running"):
        engine.adopt(HandOffKey("g", 1, 0), PromptDone(1, 0, 0.0, 0.0), [])
    engine.release_reservation(HandOffKey("g", 1, 0))
    collector.run()
    assert len(collector.record("g", 1).answers[0].tokens) == 8


@pytest.mark.parametrize(
    ("delta", "message"),
    [
        (ChoiceDelta(1, 0, b""), "without a first token"),
        (ChoiceDelta(1, 0, pack_ids([64])), "vocabulary"),
        (ChoiceDelta(1, 1, pack_ids([1])), "choices"),
    ],
)
def test_first_tokens_that_cannot_be_are_refused_and_the_reservation_stands(
    delta: ChoiceDelta, message: str
) -> None:
    engine, _ = mock_engine()
    reservation = engine.reserve("g", Submit(1, pack_ids([1] * 10), sampling()))
    assert reservation is not None
    with pytest.raises(InvalidRequest, match=message):
        engine.adopt(reservation.key, PromptDone(1, 0, 0.0, 0.0), [delta])
    engine.check_integrity()
    engine.release_reservation(reservation.key)
    assert engine.load().kv_blocks_used == 0


def test_an_attempt_whose_prompt_is_held_is_not_computed_again() -> None:
    engine, _ = mock_engine()
    message = Submit(1, pack_ids([1] * 10), sampling(), hand_off=DECODE)
    engine.submit("g", message)
    engine.step()
    with pytest.raises(InvalidRequest, match="already"):
        engine.submit("g", message)
    engine.release_hold(HandOffKey("g", 1, 0))
    engine.submit("g", message)


def test_reservations_and_imports_leave_room_to_the_first_that_waits() -> None:
    engine, _ = mock_engine(num_blocks=16, max_model_len=64)
    collector = Collector(engine)
    collector.submit(1, [1] * 30, sampling(max_tokens=3))
    collector.step()
    collector.submit(2, [2] * 32, sampling(max_tokens=3))
    assert engine.reserve("g", Submit(3, pack_ids([3] * 4), sampling())) is None
    assert engine.prefixes.begin_import(unpack_ids(pack_ids([4] * 9)), "", 2) is None
    collector.run()
    assert engine.reserve("g", Submit(3, pack_ids([3] * 4), sampling())) is not None


def test_an_import_leaves_the_watermark_and_keeps_the_prefix_it_goes_on_from() -> None:
    engine, _ = mock_engine(num_blocks=10, max_model_len=40, watermark_blocks=2)
    prompt = list(range(37))
    collector = Collector(engine)
    collector.submit(1, prompt[:13], sampling(max_tokens=1))
    collector.run()
    packed = unpack_ids(pack_ids(prompt))
    assert engine.prefixes.begin_import(packed, "", 9) is None
    taken = engine.prefixes.begin_import(packed, "", 8)
    assert taken is not None
    assert (taken.first_block, len(taken.block_ids)) == (3, 5)
    assert engine.prefixes.import_hashes(99) == []
    engine.prefixes.finish_import(taken.import_id, 99)
    engine.check_integrity()
    assert len(engine.cached_hashes()) == 8


def test_adopted_choices_without_a_place_keep_their_blocks_and_compute_no_prompt() -> None:
    pair = TwoEngines(lambda: mock_engine(max_num_seqs=2, num_blocks=64))
    blocking = Collector(pair.decode)
    blocking.submit(9, [5] * 3, sampling(max_tokens=30))
    blocking.step()
    assert pair.submit(1, list(range(10)), sampling(n=3, max_tokens=6))
    before = pair.decode_runner.num_tokens_computed
    pair.run()
    # Of the other one 29 tokens are fed, of each choice all but the last.
    assert pair.decode_runner.num_tokens_computed - before == 29 + 3 * 5


def test_a_prompt_is_announced_block_by_block_and_its_tail_with_its_end() -> None:
    engine, _ = mock_engine(max_num_batched_tokens=8)
    prompt = list(range(22))
    collector = Collector(engine)
    collector.submit(1, prompt[:9], sampling(max_tokens=1))
    collector.run()
    engine.submit(GATEWAY, Submit(2, pack_ids(prompt), sampling(), hand_off=DECODE))
    announced = []
    for _ in range(2):
        engine.step()
        announced.append(
            [
                (event.first_block, len(event.block_ids))
                for event in engine.take_hand_off_events()
                if isinstance(event, BlocksComputed)
            ]
        )
    # Two cached blocks come with the first computed ones.
    assert announced == [[(0, 4)], [(4, 1), (5, 1)]]
