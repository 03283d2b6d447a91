"""The step loop over a mock model, against the naive loop that computes everything anew."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.engines import VOCAB, Collector, mock_engine, naive_answer
from support.mock_runner import mock_logits
from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.messages import LogprobRows
from twinfire.protocol.sampling import SamplingParams
from twinfire.protocol.tokens import unpack_floats, unpack_ids


def sampling(**kw: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 8, "seed": 5, **kw})  # type: ignore[arg-type]


REQUESTS = st.tuples(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.builds(
        sampling,
        n=st.integers(1, 3),
        max_tokens=st.integers(1, 20),
        seed=st.integers(-(2**63), 2**63 - 1),
        temperature=st.sampled_from([0.0, 1.0]),
        top_p=st.sampled_from([1.0, 0.8]),
        eos_token_ids=st.sampled_from([(), (1, 2, 3, 4)]),
        stop_token_ids=st.sampled_from([(), (9, 10)]),
        frequency_penalty=st.sampled_from([0.0, 1.5]),
        prompt_logprobs=st.sampled_from([-1, -1, 1]),
    ),
)


@settings(max_examples=120, deadline=None)
@given(
    requests=st.lists(st.tuples(REQUESTS, st.integers(0, 6)), min_size=1, max_size=7),
    num_blocks=st.sampled_from([17, 24, 200]),
    budget=st.sampled_from([8, 32]),
    policy=st.sampled_from(["fair", "fcfs", "priority"]),
    prefix_cache=st.booleans(),
)
def test_same_tokens_batched_chunked_shared_forked_and_preempted(
    requests: list[tuple[tuple[list[int], SamplingParams], int]],
    num_blocks: int,
    budget: int,
    policy: str,
    prefix_cache: bool,
) -> None:
    engine, _ = mock_engine(
        num_blocks=num_blocks,
        max_model_len=64,
        max_num_batched_tokens=budget,
        policy=policy,
        enable_prefix_cache=prefix_cache,
    )
    collector = Collector(engine)
    for request_id, ((prompt, params), steps_before) in enumerate(requests):
        for _ in range(steps_before):
            collector.step()
            engine.check_integrity()
        collector.submit(request_id, prompt, params, priority=request_id % 3)
    collector.run()
    for request_id, ((prompt, params), _) in enumerate(requests):
        record = collector.requests["g", request_id]
        assert record.num_prompt_reports == 1
        for choice in range(params.n):
            expected = naive_answer(prompt, params, choice)
            got = record.answers[choice]
            assert got.tokens == expected.tokens
            assert got.finish_reason == expected.finish_reason
            assert got.stop_token_id == expected.stop_token_id
        if params.prompt_logprobs >= 0:
            assert_prompt_logprobs(record.prompt_logprobs, prompt)
            assert record.cached_tokens == 0, "prompt_logprobs must compute every row"


def assert_prompt_logprobs(rows: LogprobRows | None, prompt: list[int]) -> None:
    assert rows is not None
    expected = []
    for position in range(1, len(prompt)):
        logits = mock_logits(np.array(prompt[:position]), VOCAB).astype(np.float64)
        expected.append(logits[prompt[position]] - np.log(np.exp(logits).sum()))
    np.testing.assert_allclose(unpack_floats(rows.token_logprobs), expected, atol=1e-4)


@settings(max_examples=80, deadline=None)
@given(
    requests=st.lists(REQUESTS, min_size=1, max_size=6),
    cancels=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 5), st.integers(-1, 2))),
)
def test_cancelled_choices_free_their_blocks_and_harm_nobody(
    requests: list[tuple[list[int], SamplingParams]], cancels: list[tuple[int, int, int]]
) -> None:
    engine, _ = mock_engine(num_blocks=24, max_model_len=64)
    collector = Collector(engine)
    for request_id, (prompt, params) in enumerate(requests):
        collector.submit(request_id, prompt, params)
    cancelled: set[tuple[int, int]] = set()
    for step in range(13):
        for when, request_id, choice in cancels:
            if when == step:
                engine.cancel("g", request_id, choice)
                engine.check_integrity()
                cancelled |= {(request_id, c) for c in ([choice] if choice >= 0 else range(3))}
        collector.step()
        engine.check_integrity()
    collector.run()
    for request_id, (prompt, params) in enumerate(requests):
        for choice in range(params.n):
            expected = naive_answer(prompt, params, choice).tokens
            record = collector.requests.get(("g", request_id))
            got = record.answers[choice].tokens if record and choice in record.answers else []
            if (request_id, choice) in cancelled:
                assert got == expected[: len(got)]
            else:
                assert got == expected


def test_choices_cancelled_one_by_one_before_the_prompt_is_done_free_it() -> None:
    engine, _ = mock_engine()
    collector = Collector(engine)
    collector.submit(1, [1] * 60, sampling(n=3))
    collector.step()
    for choice in (0, 2, 1):
        engine.cancel("g", 1, choice)
        engine.check_integrity()
    assert not engine.has_work
    assert engine.load().kv_blocks_used == 0


def test_n_choices_compute_the_prompt_once() -> None:
    prompt = [1] * 30
    for n in (1, 4):
        engine, runner = mock_engine(num_blocks=100)
        collector = Collector(engine)
        collector.submit(1, prompt, sampling(n=n, max_tokens=1))
        collector.run()
        assert runner.num_tokens_computed == 30
        assert len(collector.requests["g", 1].answers) == n


def test_a_second_equal_prompt_is_cached_in_whole_blocks_but_its_last_token() -> None:
    engine, _ = mock_engine(block_size=4)
    collector = Collector(engine)
    for request_id, length in enumerate((16, 16, 18, 3)):
        collector.submit(request_id, list(range(length)), sampling(max_tokens=1))
        collector.run()
    cached = [collector.requests["g", i].cached_tokens for i in range(4)]
    assert cached == [0, 12, 16, 0]


def test_salts_do_not_share() -> None:
    engine, _ = mock_engine()
    collector = Collector(engine)
    for request_id, salt in enumerate(("a", "b", "a")):
        collector.submit(request_id, [1] * 20, sampling(), cache_salt=salt)
        collector.run()
    assert [collector.requests["g", i].cached_tokens for i in range(3)] == [0, 0, 16]


def test_max_tokens_zero_scores_the_prompt_and_ends() -> None:
    engine, _ = mock_engine()
    collector = Collector(engine)
    prompt = [3, 1, 2] * 9
    collector.submit(1, prompt, sampling(max_tokens=0, prompt_logprobs=2, n=2))
    collector.run()
    record = collector.requests["g", 1]
    assert_prompt_logprobs(record.prompt_logprobs, prompt)
    assert record.prompt_logprobs is not None
    assert len(unpack_ids(record.prompt_logprobs.top_ids)) == 2 * (len(prompt) - 1)
    assert [answer.finish_reason for answer in record.answers.values()] == ["length"] * 2
    assert all(answer.tokens == [] for answer in record.answers.values())


def test_gateways_do_not_see_each_other() -> None:
    engine, _ = mock_engine()
    collector = Collector(engine)
    collector.submit(1, [1, 2], sampling(), gateway="a")
    collector.submit(1, [2, 1], sampling(), gateway="b")
    collector.step()
    engine.cancel_gateway("a")
    engine.check_integrity()
    collector.run()
    assert collector.requests["a", 1].answers[0].finish_reason is None
    assert (
        collector.requests["b", 1].answers[0].tokens == naive_answer([2, 1], sampling(), 0).tokens
    )


@pytest.mark.parametrize(
    ("prompt", "kw", "param"),
    [
        ([], {}, "prompt"),
        ([VOCAB], {}, "prompt"),
        ([2**32 - 1], {}, "prompt"),
        ([1], {"logit_bias": ((VOCAB, 1.0),)}, "logit_bias"),
        ([1], {"logit_bias": ((-1, 1.0),)}, "logit_bias"),
        ([1], {"stop_token_ids": (2**63,)}, "stop_token_ids"),
        ([1], {"allowed_token_ids": (VOCAB,)}, "allowed_token_ids"),
        ([1], {"bad_words": ((1, -5),)}, "bad_words"),
        ([1] * 128, {}, None),
        ([1] * 100, {"max_tokens": 29}, None),
    ],
)
def test_impossible_requests_are_refused_and_the_engine_lives(
    prompt: list[int], kw: dict[str, object], param: str | None
) -> None:
    engine, _ = mock_engine(max_model_len=128)
    collector = Collector(engine)
    with pytest.raises(InvalidRequest) as refusal:
        collector.submit(1, prompt, sampling(**kw))
    if param is not None:
        assert refusal.value.param == param
    assert not engine.has_work
    collector.submit(2, [1], sampling())
    collector.run()


def test_a_request_id_in_use_is_refused() -> None:
    engine, _ = mock_engine()
    collector = Collector(engine)
    collector.submit(1, [1], sampling())
    with pytest.raises(InvalidRequest, match="already running"):
        collector.submit(1, [1], sampling())
