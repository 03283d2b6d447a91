"""Selections over vocabularies, against numpy on every instruction set."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.numpy_sampling_ops import NumpySamplingOps
from twinfire.kernels.cpu import _native
from twinfire.kernels.cpu.native_sampling import NativeSamplingOps
from twinfire.kernels.torch.sampling import TorchSamplingOps

ISAS = _native.supported_isas()
NAIVE = NumpySamplingOps()

VOCABS = st.sampled_from([1, 2, 15, 16, 17, 63, 64, 65, 1000, 1024, 1025, 4_999])


@st.composite
def logits(draw: st.DrawFn) -> np.ndarray:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = (draw(st.integers(1, 4)), draw(VOCABS))
    rows = rng.standard_normal(shape).astype(np.float32) * draw(st.sampled_from([0.1, 8.0, 1e4]))
    if draw(st.booleans()):
        rows = np.round(rows)  # many equal values
    if draw(st.booleans()):
        rows[rng.random(shape) < draw(st.sampled_from([0.1, 0.95, 1.0]))] = -np.inf
    return rows


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=60, deadline=None)
@given(rows=logits(), data=st.data())
def test_selects_as_numpy_does(isa: str, rows: np.ndarray, data: st.DataObject) -> None:
    before = rows.copy()
    np.testing.assert_array_equal(_native.argmax(isa, rows), NAIVE.argmax(rows))
    k = data.draw(st.one_of(st.integers(1, min(70, rows.shape[1])), st.integers(1, rows.shape[1])))
    values, ids = _native.top_k(isa, rows, k)
    expected_values, expected_ids = NAIVE.top_k(rows, k)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_array_equal(values, expected_values)
    np.testing.assert_array_equal(rows, before)


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=60, deadline=None)
@given(rows=logits())
def test_sums_as_numpy_does(isa: str, rows: np.ndarray) -> None:
    with np.errstate(all="ignore"):
        finite = np.isfinite(rows).any(axis=1)
        expected = NAIVE.logsumexp(rows[finite])
    sums = _native.logsumexp(isa, rows)
    np.testing.assert_allclose(sums[finite], expected, rtol=1e-6, atol=2e-6)
    assert (sums[~finite] == -np.inf).all()


@pytest.mark.parametrize("isa", ISAS)
def test_agrees_with_torch_on_a_whole_vocabulary(isa: str) -> None:
    rows = np.random.default_rng(1).standard_normal((3, 151_936)).astype(np.float32) * 5
    rows[1] = np.round(rows[1])
    torch_ops = TorchSamplingOps()
    np.testing.assert_array_equal(_native.argmax(isa, rows), NAIVE.argmax(rows))
    for ours, theirs in zip(_native.top_k(isa, rows, 100), torch_ops.top_k(rows, 100), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_allclose(_native.logsumexp(isa, rows), torch_ops.logsumexp(rows), rtol=1e-6)


@pytest.mark.parametrize("isa", ISAS)
def test_a_row_gives_the_same_bits_wherever_it_lies(isa: str) -> None:
    rows = np.random.default_rng(2).standard_normal((5, 1_003)).astype(np.float32)
    together = _native.logsumexp(isa, rows)
    alone = np.concatenate([_native.logsumexp(isa, row[None].copy()) for row in rows])
    np.testing.assert_array_equal(together.view(np.uint32), alone.view(np.uint32))


@pytest.mark.parametrize("isa", ISAS)
def test_what_is_no_number_is_never_chosen_before_one(isa: str) -> None:
    row = np.full((1, 200), np.nan, np.float32)
    row[0, 70], row[0, 150] = -3.0, 2.0
    assert _native.argmax(isa, row) == [150]
    values, ids = _native.top_k(isa, row, 4)
    assert ids.tolist() == [[150, 70, 0, 1]]
    np.testing.assert_array_equal(values, [[2.0, -3.0, np.nan, np.nan]])
    np.testing.assert_allclose(_native.logsumexp(isa, row), [np.logaddexp(2.0, -3.0)], rtol=1e-6)


@pytest.mark.parametrize("isa", ISAS)
def test_infinite_logits_have_an_infinite_sum(isa: str) -> None:
    row = np.zeros((1, 40), np.float32)
    row[0, 3] = np.inf
    assert _native.logsumexp(isa, row) == [np.inf]
    assert _native.argmax(isa, row) == [3]


@pytest.mark.parametrize("k", [0, -1, 6])
def test_k_must_fit_the_vocabulary(k: int) -> None:
    with pytest.raises(ValueError, match=r"\[1, 5\]"):
        _native.top_k(ISAS[0], np.zeros((1, 5), np.float32), k)


def test_an_empty_vocabulary_has_nothing_to_choose() -> None:
    with pytest.raises(ValueError, match="empty"):
        _native.argmax(ISAS[0], np.zeros((1, 0), np.float32))


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=60, deadline=None)
@given(rows=logits(), seed=st.integers(0, 2**32), density=st.sampled_from([0.0, 0.02, 0.5, 1.0]))
def test_keeps_what_is_allowed_as_numpy_does(
    isa: str, rows: np.ndarray, seed: int, density: float
) -> None:
    row, vocab = rows[0], rows.shape[1]
    allowed = np.random.default_rng(seed).random(vocab) < density
    bits = np.zeros((vocab + 1 + 31) // 32 * 32, bool)
    bits[:vocab] = allowed
    words = np.packbits(bits, bitorder="little").view(np.uint32)
    expected = np.where(allowed, row, -np.inf)
    for keep in (NativeSamplingOps(isa).keep_allowed, NAIVE.keep_allowed):
        copied = row.copy()
        keep(copied, words)
        np.testing.assert_array_equal(copied, expected)


@pytest.mark.parametrize("keep", [NativeSamplingOps().keep_allowed, NAIVE.keep_allowed])
def test_too_few_bits_are_no_mask(keep: Callable[[np.ndarray, np.ndarray], None]) -> None:
    with pytest.raises(ValueError, match="1 words"):
        keep(np.zeros(33, np.float32), np.zeros(1, np.uint32))
