"""Following a predicted output, and finding it again after an edit."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from twinfire.engine.drafters.drafter import DraftContext
from twinfire.engine.drafters.prediction import PredictionDrafter

PROMPT = [900, 901]


def context(prediction: Sequence[int], limit: int = 8) -> DraftContext:
    return DraftContext(("g", 1, 0), array("I", PROMPT), len(PROMPT), "", prediction, limit)


def num_steps(prediction: Sequence[int], output: Sequence[int], limit: int = 8) -> int:
    """Steps that the output takes when every guess is checked."""
    one, drafter, steps = context(prediction, limit), PredictionDrafter(), 0
    done = 0
    while done < len(output):
        (draft,) = drafter.propose([one])
        accepted = 0
        while (
            accepted < len(draft.token_ids)
            and done + accepted < len(output)
            and draft.token_ids[accepted] == output[done + accepted]
        ):
            accepted += 1
        new = output[done : done + accepted + 1]
        one.tokens.extend(new)
        done += len(new)
        steps += 1
    return steps


def test_the_prediction_is_guessed_from_the_first_token_on() -> None:
    one, drafter = context(range(20)), PredictionDrafter()
    (draft,) = drafter.propose([one])
    assert draft.token_ids == list(range(8))
    assert draft.source == "prediction"
    one.tokens.extend(range(9))
    (later,) = drafter.propose([one])
    assert later.token_ids == list(range(9, 17))
    assert later.confidences[0] > draft.confidences[0]


def test_without_a_prediction_nothing_is_guessed() -> None:
    (draft,) = PredictionDrafter().propose([context([])])
    assert draft.token_ids == []


def test_the_end_of_the_prediction_is_the_end_of_guessing() -> None:
    one, drafter = context([1, 2, 3]), PredictionDrafter()
    one.tokens.extend([1, 2, 3])
    assert drafter.propose([one])[0].token_ids == []
    one.tokens.extend([4, 5, 6])
    assert drafter.propose([one])[0].token_ids == []


def test_an_exact_prediction_takes_as_few_steps_as_limits_allow() -> None:
    assert num_steps(range(90), range(90)) == 10


def test_replaced_inserted_and_deleted_tokens_cost_a_few_steps_each() -> None:
    text = list(range(100, 300))
    replaced = [*text[:50], 7, *text[51:]]
    inserted = [*text[:50], 7, 8, 9, *text[50:]]
    deleted = [*text[:50], *text[70:]]
    unchanged = num_steps(text, text)
    for output in (replaced, inserted, deleted):
        assert num_steps(text, output) <= unchanged + 6


def test_after_an_edit_the_next_of_equal_places_is_taken() -> None:
    block = [1, 2, 3, 4]
    one = context([*block, 50, *block, 51, *block, 52, *block, 53])
    one.tokens.extend([*block, 50, *block, 99, *block])
    (draft,) = PredictionDrafter().propose([one])
    assert draft.token_ids[0] == 52


@given(
    st.lists(st.integers(0, 5), max_size=40),
    st.lists(st.integers(0, 5), max_size=40),
    st.integers(0, 5),
)
def test_any_output_is_survived(prediction: list[int], output: list[int], limit: int) -> None:
    one, drafter = context(prediction, limit), PredictionDrafter()
    for token in output:
        (draft,) = drafter.propose([one])
        assert len(draft.token_ids) == len(draft.confidences) <= limit
        assert all(0 < confidence < 1 for confidence in draft.confidences)
        one.tokens.append(token)
    drafter.ended(one)
    drafter.forget(one.key)


def test_a_prediction_of_other_text_is_soon_trusted_less() -> None:
    chooser = random.Random(3)
    one, drafter = context([chooser.randrange(3) for _ in range(200)]), PredictionDrafter()
    first = drafter.propose([one])[0].confidences[0]
    confidences = []
    for _ in range(60):
        one.tokens.append(chooser.randrange(3))
        draft = drafter.propose([one])[0]
        confidences.extend(draft.confidences[:1])
    assert min(confidences[-10:]) < first - 0.1
