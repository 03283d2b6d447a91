"""How many guesses are checked: by what they cost and bring."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinfire.engine.drafters.calibration import Calibration
from twinfire.engine.drafters.draft_lengths import DraftLengths
from twinfire.engine.drafters.drafter import Draft
from twinfire.engine.drafters.step_costs import StepCosts

Curve = Callable[[int], float]


def curve(row_share: float) -> Curve:
    """Seconds by rows, where one row more costs so much of a step of one row."""
    return lambda rows: 0.01 * (1.0 + row_share * (rows - 1))


def lengths_for(seconds: Curve, max_drafts: int = 16) -> DraftLengths:
    costs = StepCosts()
    costs.calibrate(seconds, 256)
    return DraftLengths(costs, max_drafts)


def draft(num_tokens: int, confidence: float, source: str = "suffix") -> Draft:
    return Draft([1] * num_tokens, [confidence] * num_tokens, source)


def run(
    lengths: DraftLengths,
    seconds: Curve,
    chance: Callable[[int], float],
    *,
    num_steps: int,
    batch: int = 1,
    confidence: float = 0.8,
    seed: int = 0,
) -> tuple[float, float]:
    """Return (speed relative to no guessing, mean length of the last fifth)."""
    chooser = random.Random(seed)
    took_s, tokens, last = 0.0, 0, []
    for step in range(num_steps):
        drafts = [draft(16, confidence) for _ in range(batch)]
        chosen = lengths.choose(drafts, 0)
        took_s += seconds(batch + sum(chosen))
        for one, length in zip(drafts, chosen, strict=True):
            accepted = 0
            while accepted < length and chooser.random() < chance(step):
                accepted += 1
            lengths.note_verdict(one.source, one.confidences[:length], accepted)
            tokens += accepted + 1
        if step >= num_steps * 4 // 5:
            last.append(sum(chosen) / batch)
    off_s = tokens / batch * seconds(batch)
    return off_s / took_s, sum(last) / len(last)


drafts_of_any_kind = st.lists(
    st.builds(
        lambda confidences, source: Draft([1] * len(confidences), confidences, source),
        st.lists(st.floats(0.0, 1.0), max_size=20),
        st.sampled_from(["ngram", "suffix", "eagle3"]),
    ),
    max_size=6,
)


@given(drafts_of_any_kind, st.integers(0, 100), st.integers(1, 16), st.floats(0.0, 1.0))
def test_a_choice_is_within_every_limit(
    drafts: list[Draft], num_other_rows: int, max_drafts: int, row_share: float
) -> None:
    lengths = lengths_for(curve(row_share), max_drafts)
    for _ in range(3):
        chosen = lengths.choose(drafts, num_other_rows)
        assert len(chosen) == len(drafts)
        for one, length in zip(drafts, chosen, strict=True):
            assert 0 <= length <= min(len(one.token_ids), max_drafts)
            lengths.note_verdict(one.source, one.confidences[:length], length // 2)


@pytest.mark.parametrize("row_share", [0.02, 0.2, 1.0])
@pytest.mark.parametrize("batch", [1, 8])
def test_guesses_that_are_never_right_come_to_cost_nothing(row_share: float, batch: int) -> None:
    seconds = curve(row_share)
    speed, length = run(lengths_for(seconds), seconds, lambda _: 0.0, num_steps=2_000, batch=batch)
    assert speed > 0.98
    assert length < 0.3


@pytest.mark.parametrize("row_share", [0.02, 0.1])
def test_guesses_that_are_always_right_are_all_taken(row_share: float) -> None:
    seconds = curve(row_share)
    speed, length = run(lengths_for(seconds), seconds, lambda _: 1.0, num_steps=300)
    assert length == 16
    assert speed > 0.9 * 17 / (1 + 16 * row_share)


def test_where_a_row_costs_a_whole_step_nothing_is_taken() -> None:
    lengths = lengths_for(lambda rows: 0.01 * rows)
    assert sum(sum(lengths.choose([draft(8, 0.99)], 0)) for _ in range(50)) == 0


def test_a_large_batch_takes_fewer() -> None:
    def seconds(rows: int) -> float:
        """Waits for memory up to 16 rows, computes from there on."""
        return 0.01 * max(1.0, rows / 16)

    chosen = {
        batch: lengths_for(seconds).choose([draft(16, 0.8)] * batch, 0) for batch in (1, 4, 16, 64)
    }
    means = [sum(one) / len(one) for one in chosen.values()]
    assert means == sorted(means, reverse=True)
    assert means[0] > 10
    assert means[-1] == 0


def test_guesses_give_way_to_a_prompt_that_is_computed_beside_them() -> None:
    seconds = curve(0.1)
    assert lengths_for(seconds).choose([draft(16, 0.8)], 0)[0] > 3
    assert lengths_for(seconds).choose([draft(16, 0.8)], 500)[0] <= 1


def test_the_surest_guesses_of_a_batch_get_the_rows() -> None:
    lengths = lengths_for(curve(0.2))
    unsure, sure = lengths.choose([draft(8, 0.2), draft(8, 0.95)], 0)
    assert unsure <= 1 < sure


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("row_share", [0.01, 0.05, 0.3, 1.0])
@pytest.mark.parametrize("chance", [0.0, 0.1, 0.3, 0.6, 0.9])
def test_it_is_never_much_slower_than_without(batch: int, row_share: float, chance: float) -> None:
    """Also where the drafter is far too sure of itself, as it is here."""
    seconds = curve(row_share)
    speed, _ = run(
        lengths_for(seconds),
        seconds,
        lambda _: chance,
        num_steps=800 if batch < 16 else 300,
        batch=batch,
        confidence=0.9,
    )
    assert speed > 0.98


def test_a_source_that_became_good_is_taken_again() -> None:
    seconds = curve(0.05)
    lengths = lengths_for(seconds)
    _, before = run(lengths, seconds, lambda _: 0.0, num_steps=1_500)
    _, after = run(lengths, seconds, lambda _: 0.95, num_steps=1_500)
    assert before < 0.3
    assert after > 10


def test_a_source_that_became_bad_is_left() -> None:
    seconds = curve(0.05)
    lengths = lengths_for(seconds)
    _, before = run(lengths, seconds, lambda _: 0.95, num_steps=500)
    _, after = run(lengths, seconds, lambda _: 0.0, num_steps=1_500)
    assert before == 16
    assert after < 0.3


def test_without_adapting_all_are_checked() -> None:
    costs = StepCosts()
    lengths = DraftLengths(costs, 5, is_adaptive=False)
    assert lengths.choose([draft(16, 0.01), draft(2, 0.01), draft(0, 0.0)], 9) == [5, 2, 0]


def test_chances_are_learned_for_each_source_and_position() -> None:
    calibration, chooser = Calibration(), random.Random(0)
    for _ in range(1_000):
        first = chooser.random() < 0.9
        calibration.note("eagle3", [0.5, 0.5], first + (first and chooser.random() < 0.2))
        calibration.note("suffix", [0.5, 0.5], 0)
    eagle = calibration.chances(draft(2, 0.5, "eagle3"))
    assert eagle == pytest.approx([0.9, 0.2], abs=0.1)
    assert calibration.chances(draft(2, 0.5, "suffix"))[0] < 0.02
    assert calibration.chances(draft(2, 0.5, "ngram")) == [0.5, 0.5]
    assert calibration.mean_accepted("eagle3") == pytest.approx(1.1, abs=0.4)
    assert calibration.mean_accepted("ngram") == 1.0


@given(
    st.lists(
        st.tuples(st.lists(st.floats(0.0, 1.0), max_size=20), st.integers(0, 20)), max_size=60
    ),
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=20),
)
def test_chances_are_chances(verdicts: list[tuple[list[float], int]], asked: list[float]) -> None:
    calibration = Calibration()
    for confidences, accepted in verdicts:
        calibration.note("suffix", confidences, min(accepted, len(confidences)))
    chances = calibration.chances(Draft([1] * len(asked), asked, "suffix"))
    assert all(0.0 <= chance <= 1.0 for chance in chances)
