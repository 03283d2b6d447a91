"""The sampler against plain definitions computed over the whole vocabulary."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.numpy_sampling_ops import NumpySamplingOps
from twinfire.engine.noise import bits_reaching, gumbel, noise_bits, noise_key
from twinfire.engine.sampler import Sampler, SampleRow
from twinfire.engine.token_history import TokenHistory
from twinfire.protocol.sampling import SamplingParams
from twinfire.protocol.tokens import unpack_floats, unpack_ids

VOCAB = 500
SAMPLER = Sampler(NumpySamplingOps())


def history(prompt: list[int] = [1], output: tuple[int, ...] = ()) -> TokenHistory:  # noqa: B006
    seen = TokenHistory(array("I", prompt))
    for token_id in output:
        seen.append(token_id)
    return seen


def row(params: SamplingParams, position: int = 7, choice: int = 0, **kw: object) -> SampleRow:
    return SampleRow(params, choice, position, history(**kw))  # type: ignore[arg-type]


def params(**kw: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 10, "seed": 3, **kw})  # type: ignore[arg-type]


def random_logits(seed: int, rows: int = 1, spread: float = 3.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, VOCAB)).astype(np.float32) * spread


def draw(logits: np.ndarray, sample_row: SampleRow) -> int:
    return SAMPLER.sample(logits.copy(), [sample_row])[0].token_id


def full_gumbel_draw(logits: np.ndarray, kept: np.ndarray, sample_row: SampleRow) -> int:
    """The definition: argmax of scaled logits plus noise over the kept ids."""
    key = noise_key(sample_row.params.seed, sample_row.choice, sample_row.position)
    noise = gumbel(noise_bits(key, np.arange(len(logits), dtype=np.uint32)))
    scores = logits.astype(np.float64) / sample_row.params.temperature + noise
    return int(np.argmax(np.where(kept, scores, -np.inf)))


@given(st.integers(0, 10_000), st.sampled_from([0.1, 0.7, 1.0, 3.0]), st.floats(0.01, 6))
def test_unrestricted_draw_is_gumbel_max_over_the_vocabulary(
    seed: int, temperature: float, spread: float
) -> None:
    logits = random_logits(seed, spread=spread)
    sample_row = row(params(seed=seed, temperature=temperature), position=seed)
    assert draw(logits, sample_row) == full_gumbel_draw(logits[0], np.ones(VOCAB, bool), sample_row)


def kept_by_definition(logits: np.ndarray, p: SamplingParams) -> np.ndarray:
    scaled = logits.astype(np.float64) / p.temperature
    kept = np.ones(len(logits), bool)
    if p.min_p:
        kept &= scaled >= scaled.max() + np.log(p.min_p)
    if p.top_k:
        order = np.argsort(-logits, kind="stable")
        top = np.zeros(len(logits), bool)
        top[order[: p.top_k]] = True
        kept &= top
    if p.top_p < 1:
        probabilities = np.where(kept, np.exp(scaled - scaled.max()), 0)
        probabilities /= probabilities.sum()
        order = np.argsort(-probabilities, kind="stable")
        before = np.cumsum(probabilities[order]) - probabilities[order]
        nucleus = np.zeros(len(logits), bool)
        nucleus[order[before < p.top_p]] = True
        kept &= nucleus
    return kept


@settings(max_examples=200)
@given(
    st.integers(0, 10_000),
    st.sampled_from([0, 1, 5, 400, 10_000]),
    st.sampled_from([0.01, 0.5, 0.95, 0.9999, 1.0]),
    st.sampled_from([0.0, 0.05, 0.9]),
    st.sampled_from([0.05, 1.0, 6.0]),
)
def test_restricted_draw_keeps_exactly_the_defined_tokens(
    seed: int, top_k: int, top_p: float, min_p: float, spread: float
) -> None:
    logits = random_logits(seed, spread=spread)
    p = params(seed=seed, temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p)
    sample_row = row(p, position=seed)
    kept = kept_by_definition(logits[0], p)
    assert draw(logits, sample_row) == full_gumbel_draw(logits[0], kept, sample_row)


def test_drawn_frequencies_follow_the_distribution() -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.125, 0.125]], np.float32))
    counts = np.zeros(4)
    for position in range(8000):
        counts[draw(logits, row(params(), position=position))] += 1
    expected = 8000 * np.array([0.5, 0.25, 0.125, 0.125])
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 16.3, "p < 0.001 with 3 degrees of freedom"


def test_draw_depends_on_seed_choice_and_position_only() -> None:
    logits = random_logits(1, rows=6)
    rows = [row(params(seed=i % 2), position=5 + i // 4, choice=i % 3) for i in range(6)]
    together = [s.token_id for s in SAMPLER.sample(logits.copy(), rows)]
    alone = [draw(logits[i : i + 1], rows[i]) for i in range(6)]
    assert together == alone
    flat = np.zeros((1, VOCAB), np.float32)
    variants = [
        row(params()),
        row(params(seed=4)),
        row(params(), choice=1),
        row(params(), position=8),
        row(params(seed=3 + 2**32)),
    ]
    assert len({draw(flat, variant) for variant in variants}) == len(variants)


@given(st.floats(-40, 40))
def test_bits_reaching_bounds_the_noise(noise: float) -> None:
    needed = bits_reaching(noise)
    if 0 < needed <= 2**32:
        below = gumbel(np.array([needed - 1], np.uint32))[0]
        assert below <= noise


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, [40, 30]] = 1
    assert draw(logits, row(params(temperature=0.0))) == 30


def test_masks_and_bias() -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, 9] = 5
    greedy = {"temperature": 0.0}
    assert draw(logits, row(params(allowed_token_ids=(4, 5), **greedy))) == 4
    assert draw(logits, row(params(logit_bias=((7, 100.0),), **greedy))) == 7
    assert draw(logits, row(params(logit_bias=((9, -100.0),), **greedy))) == 0
    assert draw(logits, row(params(min_tokens=2, eos_token_ids=(9,), **greedy), output=(1,))) == 0
    assert draw(logits, row(params(min_tokens=1, eos_token_ids=(9,), **greedy), output=(1,))) == 9
    assert draw(logits, row(params(min_tokens=1, stop_token_ids=(9,), **greedy))) == 0
    assert draw(logits, row(params(bad_words=((9,),), **greedy))) == 0
    assert draw(logits, row(params(bad_words=((8, 9),), **greedy), output=(8,))) == 0
    assert draw(logits, row(params(bad_words=((8, 9),), **greedy), output=(7,))) == 9


def test_masks_that_leave_nothing_fall_back_to_what_is_allowed() -> None:
    logits = random_logits(5)
    p = params(allowed_token_ids=(4, 6), min_tokens=3, eos_token_ids=(4,), stop_token_ids=(6,))
    assert draw(logits, row(p)) in (4, 6)


def test_penalties_follow_their_definitions() -> None:
    logits = np.array([[2.0, -2.0, 1.0, 0.5] + [-9.0] * 4], np.float32)
    work = logits.copy()
    p = params(
        temperature=0.0,
        repetition_penalty=2.0,
        presence_penalty=0.25,
        frequency_penalty=0.5,
        logprobs=0,
    )
    SAMPLER.sample(work, [row(p, prompt=[0], output=(1, 2, 2))])
    assert work[0, 0] == pytest.approx(1.0), "prompt tokens: repetition only"
    assert work[0, 1] == pytest.approx(-4.0 - 0.25 - 0.5)
    assert work[0, 2] == pytest.approx(0.5 - 0.25 - 1.0)
    assert work[0, 3] == pytest.approx(0.5)


def test_logprobs_are_of_the_raw_distribution_and_include_the_drawn_token() -> None:
    logits = random_logits(8)
    exact = logits[0] - np.log(np.exp(logits[0].astype(np.float64)).sum())
    p = params(logprobs=5, logit_bias=((123, 100.0),), temperature=0.3)
    sample = SAMPLER.sample(logits.copy(), [row(p)])[0]
    assert sample.token_id == 123
    rows = sample.logprobs
    assert rows is not None
    assert unpack_floats(rows.token_logprobs)[0] == pytest.approx(exact[123], abs=1e-4)
    assert unpack_ids(rows.ranks)[0] == 1 + int((exact > exact[123]).sum())
    top = np.argsort(-exact)[:5]
    assert list(unpack_ids(rows.top_ids)) == list(top)
    np.testing.assert_allclose(unpack_floats(rows.top_logprobs), exact[top], atol=1e-4)


def test_score_reports_given_tokens() -> None:
    logits = random_logits(9, rows=3)
    targets = np.array([4, 400, 0])
    rows = SAMPLER.score(logits, targets, 2)
    exact = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(
        unpack_floats(rows.token_logprobs), exact[np.arange(3), targets], atol=1e-4
    )
    assert rows.k == 2
    assert len(unpack_ids(rows.top_ids)) == 6
    assert SAMPLER.score(logits, targets, 0).k == 0
    assert SAMPLER.score(logits, targets, VOCAB + 5).k == VOCAB
