"""A prompt computed by one engine and decoded by another, against one engine that does both."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.engines import Collected, Collector, mock_engine
from support.two_engines import GATEWAY, TwoEngines
from support.wire_blocks import exported
from twinfire.engine.engine import Engine
from twinfire.engine.runner import Runner
from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.messages import Submit
from twinfire.protocol.peer_messages import HandOffKey
from twinfire.protocol.sampling import SamplingParams
from twinfire.protocol.tokens import pack_ids, unpack_ids

BLOCK = 4


def sampling(**kw: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 8, "seed": 5, **kw})  # type: ignore[arg-type]


SAMPLING = st.builds(
    sampling,
    n=st.integers(1, 4),
    max_tokens=st.integers(0, 12),
    seed=st.integers(0, 99),
    temperature=st.sampled_from([0.0, 1.0]),
    eos_token_ids=st.sampled_from([(), tuple(range(16))]),
    frequency_penalty=st.sampled_from([0.0, 1.5]),
    min_tokens=st.sampled_from([0, 3]),
    logprobs=st.sampled_from([-1, 2]),
    prompt_logprobs=st.sampled_from([-1, -1, 1]),
)
PROMPTS = st.lists(st.integers(0, 3), min_size=1, max_size=30)


def alone(prompt: list[int], params: SamplingParams, make: Callable[[], tuple[Engine, Runner]]):
    collector = Collector(make()[0])
    collector.submit(1, prompt, params)
    collector.run()
    return collector.record("g", 1)


def assert_same(got: Collected, expected: Collected) -> None:
    assert got.num_prompt_reports == 1
    assert got.answers == expected.answers
    assert got.prompt_logprobs == expected.prompt_logprobs


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(st.tuples(PROMPTS, SAMPLING), min_size=1, max_size=6),
    num_blocks=st.sampled_from([16, 24, 200]),
    budget=st.sampled_from([8, 32]),
    warm=st.sampled_from(["none", "prefill", "decode", "both"]),
)
def test_a_handed_over_stream_is_the_stream_of_one_engine(
    requests: list[tuple[list[int], SamplingParams]], num_blocks: int, budget: int, warm: str
) -> None:
    def make() -> tuple[Engine, Runner]:
        return mock_engine(num_blocks=num_blocks, max_model_len=64, max_num_batched_tokens=budget)

    pair = TwoEngines(make)
    for engine, name in ((pair.prefill, "prefill"), (pair.decode, "decode")):
        if warm in (name, "both"):
            warming = Collector(engine)
            warming.submit(99, requests[0][0], sampling(max_tokens=1))
            warming.run()
    waiting = list(enumerate(requests))
    while waiting:
        index, (prompt, params) = waiting[0]
        if pair.submit(index, prompt, params):
            waiting.pop(0)
        pair.step()
    pair.run()
    for index, (prompt, params) in enumerate(requests):
        assert_same(pair.collector.record(GATEWAY, index), alone(prompt, params, make))


@pytest.mark.parametrize("length", [1, 3, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 1])
def test_each_side_computes_its_own_part_only(length: int) -> None:
    pair = TwoEngines(mock_engine)
    prompt = [index % 7 for index in range(length)]
    for request_id in (1, 2):
        assert pair.submit(request_id, prompt, sampling(n=2, max_tokens=4))
        pair.prefill.step()
        before = pair.decode_runner.num_tokens_computed
        pair.run()
        record = pair.collector.record(GATEWAY, request_id)
        cached = (length - 1) // BLOCK * BLOCK if request_id == 2 else 0
        assert (record.cached_tokens, record.computed_tokens) == (cached, length - cached)
        # Of each choice's four tokens the first came along and the last is never computed.
        assert pair.decode_runner.num_tokens_computed - before == 2 * 3


def test_cancelled_before_its_prompt_is_done_nothing_is_left() -> None:
    pair = TwoEngines(lambda: mock_engine(max_num_batched_tokens=8))
    assert pair.submit(1, list(range(30)), sampling())
    pair.step()
    pair.prefill.cancel(GATEWAY, 1)
    pair.run()
    assert [ended.key.request_id for ended in pair.ended] == [1]


def test_blocks_stay_pinned_until_they_are_released() -> None:
    pair = TwoEngines(mock_engine)
    assert pair.submit(1, list(range(10)), sampling())
    pair.prefill.step()
    assert pair.prefill.load().kv_blocks_held == 3
    assert not pair.prefill.has_work
    key = next(iter(pair.transfers))
    pair.prefill.release_hold(key)
    pair.prefill.release_hold(key)
    assert pair.prefill.load().kv_blocks_used == 0
    pair.decode.release_reservation(key)
    pair.decode.release_reservation(key)
    assert pair.decode.load().kv_blocks_used == 0
    pair.check()


def test_a_prompt_that_can_never_fit_is_refused_and_one_that_cannot_now_waits() -> None:
    engine, _ = mock_engine(num_blocks=16, max_model_len=64)
    message = Submit(1, pack_ids([1] * 40), sampling())
    assert engine.reserve("g", message) is not None
    assert engine.reserve("g", Submit(2, pack_ids([2] * 40), sampling())) is None
    with pytest.raises(InvalidRequest, match="max_model_len"):
        engine.reserve("g", Submit(3, pack_ids([1] * 70), sampling()))
    with pytest.raises(InvalidRequest, match="already"):
        engine.reserve("g", message)


@settings(max_examples=150, deadline=None)
@given(prompt=PROMPTS, params=SAMPLING, cuts=st.lists(st.integers(0, 12), min_size=4, max_size=4))
def test_a_resumed_stream_goes_on_where_it_stopped(
    prompt: list[int], params: SamplingParams, cuts: list[int]
) -> None:
    whole = alone(prompt, params, mock_engine)
    cut = {
        choice: answer.tokens[: cuts[choice]]
        for choice, answer in whole.answers.items()
        if cuts[choice] < len(answer.tokens)
    }
    if not cut:
        return
    collector = Collector(mock_engine()[0])
    collector.submit(
        1,
        prompt,
        params,
        choices=tuple(cut),
        outputs=tuple(pack_ids(tokens) for tokens in cut.values()),
    )
    collector.run()
    resumed = collector.record("g", 1)
    assert set(resumed.answers) == set(cut)
    for choice, answer in resumed.answers.items():
        expected = whole.answers[choice]
        assert cut[choice] + answer.tokens == expected.tokens
        assert answer.finish_reason == expected.finish_reason


@settings(max_examples=60, deadline=None)
@given(prompt=PROMPTS, params=SAMPLING, cut=st.integers(0, 12))
def test_a_resumed_choice_can_be_handed_over(
    prompt: list[int], params: SamplingParams, cut: int
) -> None:
    whole = alone(prompt, params, mock_engine)
    choice, answer = max(whole.answers.items(), key=lambda item: len(item[1].tokens))
    if cut >= len(answer.tokens):
        return
    pair = TwoEngines(mock_engine)
    more = {"choices": (choice,), "outputs": (pack_ids(answer.tokens[:cut]),)}
    assert pair.submit(1, prompt, params, **more)
    pair.run()
    got = pair.collector.record(GATEWAY, 1).answers[choice]
    assert answer.tokens[:cut] + got.tokens == answer.tokens
    assert got.finish_reason == answer.finish_reason


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"choices": (0, 0)}, "distinct"),
        ({"choices": (3,)}, "below n"),
        ({"choices": (0,), "outputs": (b"", b"")}, "2 given for 1"),
        ({"choices": (0,), "outputs": (pack_ids([1] * 8),)}, "max_tokens"),
        ({"choices": (0,), "outputs": (pack_ids([64]),)}, "vocabulary"),
    ],
)
def test_a_resumed_request_that_makes_no_sense_is_refused(
    more: dict[str, object], message: str
) -> None:
    engine, _ = mock_engine()
    with pytest.raises(InvalidRequest, match=message):
        engine.submit("g", Submit(1, pack_ids([1, 2]), sampling(), **more))  # type: ignore[arg-type]
    assert not engine.has_work


def test_a_pulled_prefix_is_found_and_counted() -> None:
    holder, holder_runner = mock_engine(hash_seed=b"one cluster")
    puller, puller_runner = mock_engine(hash_seed=b"one cluster")
    prompt = list(range(22))
    warming = Collector(holder)
    warming.submit(1, prompt, sampling(max_tokens=1))
    warming.run()
    packed = Submit(2, pack_ids(prompt), sampling())
    taken = puller.prefixes.begin_import(unpack_ids(packed.prompt), "", 9)
    assert taken is not None
    assert (taken.first_block, len(taken.block_ids)) == (0, 5)
    hold = holder.prefixes.hold_blocks(puller.prefixes.import_hashes(taken.import_id))
    content = exported(holder_runner, hold.block_ids)
    puller_runner.import_blocks(taken.block_ids, content)
    assert len(hold.block_ids) == 5
    puller.prefixes.finish_import(taken.import_id, 4)
    holder.prefixes.release_block_hold(hold.hold_id)
    collector = Collector(puller)
    puller.submit("g", packed, pulled_blocks=4)
    collector.run()
    assert collector.record("g", 2).cached_tokens == 16
    assert holder.load().kv_blocks_used == 0
    stored, removed = puller.take_cache_events()
    assert len(stored) >= 5
    assert not removed


def test_a_full_worker_unpacks_and_hashes_a_waiting_prompt_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, _ = mock_engine(num_blocks=8)
    first = Submit(1, pack_ids(list(range(20))), sampling(max_tokens=4))
    second = Submit(2, pack_ids(list(range(30, 50))), sampling(max_tokens=4))
    held = engine.reserve(GATEWAY, first)
    assert held is not None
    unpacked: list[bytes] = []
    monkeypatch.setattr(
        "twinfire.engine.engine.unpack_ids",
        lambda packed: unpacked.append(packed) or unpack_ids(packed),
    )
    for _ in range(3):
        assert engine.reserve(GATEWAY, second) is None
        engine.check_integrity()
    assert unpacked == [second.prompt]
    engine.release_reservation(held.key)
    granted = engine.reserve(GATEWAY, second)
    assert granted is not None
    assert unpacked == [second.prompt]
    engine.release_reservation(granted.key)
    assert not engine.holds_for_others


def test_whoever_gives_up_waiting_is_forgotten() -> None:
    engine, _ = mock_engine(num_blocks=8)
    held = engine.reserve(GATEWAY, Submit(1, pack_ids(list(range(20))), sampling(max_tokens=4)))
    assert held is not None
    waiting = Submit(2, pack_ids(list(range(30, 50))), sampling(max_tokens=4))
    assert engine.reserve(GATEWAY, waiting) is None
    engine.release_reservation(HandOffKey(GATEWAY, 2, waiting.attempt))
    engine.release_reservation(held.key)
    # The same key stands for another prompt now.
    other = engine.reserve(GATEWAY, Submit(2, pack_ids([1] * 9), sampling(max_tokens=4)))
    assert other is not None
    assert len(other.block_ids) == 3
