"""Rates by position, counted by hand."""

from __future__ import annotations

import pytest
import torch

from twinfire.training.acceptance import AcceptanceCurve, acceptance_table


def test_a_draft_counts_only_where_all_before_it_were_right() -> None:
    curve = AcceptanceCurve()
    curve.add(torch.tensor([[True, True], [True, False], [False, True], [False, False]]))
    assert curve.rates() == [0.5, 0.5]
    assert curve.length(2) == pytest.approx(1 + 0.5 + 0.25)
    assert curve.length(1) == pytest.approx(1.5)
    curve.add(torch.ones(4, 2, dtype=torch.bool))
    assert curve.rates() == [0.75, pytest.approx(5 / 6)]
    assert "| x | 8 | 0.750 | 0.833 | 2.38 |" in acceptance_table({"x": curve})


def test_what_cannot_be_judged_is_not_counted() -> None:
    curve = AcceptanceCurve()
    curve.add(
        torch.tensor([[True, True], [True, True], [True, False]]),
        torch.tensor([[True, False], [True, True], [True, True]]),
    )
    assert curve.num_tried == [3, 2]
    assert curve.rates() == [1.0, 0.5]


def test_nothing_counted_is_a_token_a_step() -> None:
    assert AcceptanceCurve().length(3) == 1.0
    assert AcceptanceCurve().rates() == []
