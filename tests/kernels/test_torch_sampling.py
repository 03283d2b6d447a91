"""Selections over vocabularies against sorting, ties included."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.numpy_sampling_ops import NumpySamplingOps
from twinfire.kernels.torch.sampling import TorchSamplingOps


@settings(max_examples=200, deadline=None)
@given(
    num_rows=st.integers(1, 4),
    vocab=st.integers(1, 40),
    num_values=st.integers(1, 6),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_ties_go_to_the_lowest_id(
    num_rows: int, vocab: int, num_values: int, seed: int, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    choices = np.array([-np.inf, -2.0, -0.0, 0.5, 1.0, 7.25], np.float32)[:num_values]
    logits = rng.choice(choices, (num_rows, vocab))
    k = data.draw(st.integers(1, vocab))
    before = logits.copy()
    values, ids = TorchSamplingOps().top_k(logits, k)
    order = np.lexsort((np.broadcast_to(np.arange(vocab), logits.shape), -logits), axis=1)
    np.testing.assert_array_equal(ids, order[:, :k])
    np.testing.assert_array_equal(values, np.take_along_axis(logits, order[:, :k], 1))
    np.testing.assert_array_equal(TorchSamplingOps().argmax(logits), order[:, 0])
    np.testing.assert_array_equal(logits, before)


def test_equals_the_numpy_ops_on_a_real_size() -> None:
    logits = np.random.default_rng(0).normal(size=(5, 50_000)).astype(np.float32)
    logits = logits.astype(np.float16).astype(np.float32)
    for mine, theirs in zip(
        TorchSamplingOps().top_k(logits, 200), NumpySamplingOps().top_k(logits, 200), strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)


def test_logsumexp_of_a_row_ignores_the_others() -> None:
    logits = np.random.default_rng(1).normal(size=(17, 5003)).astype(np.float32) * 9
    together = TorchSamplingOps().logsumexp(logits)
    wide = logits.astype(np.float64)
    expected = np.log(np.exp(wide - wide.max(1, keepdims=True)).sum(1)) + wide.max(1)
    np.testing.assert_allclose(together, expected, rtol=1e-6)
    for row in range(17):
        assert TorchSamplingOps().logsumexp(logits[row : row + 1])[0] == together[row]


@pytest.mark.parametrize("k", [0, 6])
def test_impossible_k_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match=r"\[1, 5\]"):
        TorchSamplingOps().top_k(np.zeros((1, 5), np.float32), k)
