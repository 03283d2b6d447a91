"""Guesses from a choice's own text and from a tenant's past outputs."""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinfire.engine.drafters.choice_index import ChoiceIndexes, anchor_lengths
from twinfire.engine.drafters.drafter import Draft, DraftContext
from twinfire.engine.drafters.ngram import NgramDrafter
from twinfire.engine.drafters.past_outputs import SEPARATOR, PastOutputs
from twinfire.engine.drafters.suffix import SuffixDrafter

CYCLE = [5, 6, 7, 8, 9, 10, 11, 12]


def context(
    tokens: Sequence[int],
    num_prompt_tokens: int | None = None,
    tenant: str = "",
    number: int = 0,
    limit: int = 8,
) -> DraftContext:
    held = array("I", tokens)
    count = len(held) if num_prompt_tokens is None else num_prompt_tokens
    return DraftContext(("gateway", number, 0), held, count, tenant, (), limit)


@pytest.mark.parametrize("drafter", [NgramDrafter(), SuffixDrafter()])
def test_what_followed_before_is_guessed(drafter: NgramDrafter | SuffixDrafter) -> None:
    (draft,) = drafter.propose([context([1, 2, 3, *CYCLE, 90, 91, 5, 6, 7])])
    assert draft.token_ids == [8, 9, 10, 11, 12, 90, 91, 5]
    assert len(draft.confidences) == 8
    assert all(0 < confidence < 1 for confidence in draft.confidences)


@pytest.mark.parametrize("drafter", [NgramDrafter(), SuffixDrafter()])
def test_nothing_is_guessed_of_new_text(drafter: NgramDrafter | SuffixDrafter) -> None:
    (draft,) = drafter.propose([context(range(100))])
    assert draft.token_ids == draft.confidences == []
    (none_wanted,) = drafter.propose([context([1, 2, 1, 2, 1, 2], number=1, limit=0)])
    assert none_wanted.token_ids == []


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.integers(0, 6))
def test_a_draft_is_part_of_the_text_and_within_its_limit(tokens: list[int], limit: int) -> None:
    for drafter in (NgramDrafter(1), SuffixDrafter()):
        (draft,) = drafter.propose([context(tokens, limit=limit)])
        assert len(draft.token_ids) == len(draft.confidences) <= limit
        assert set(draft.token_ids) <= set(tokens)
        assert all(0.0 < confidence <= 1.0 for confidence in draft.confidences)


def test_the_latest_of_equal_matches_is_taken() -> None:
    (draft,) = NgramDrafter().propose([context([1, 2, 30, 0, 1, 2, 31, 0, 1, 2], limit=1)])
    assert draft.token_ids == [31]


def test_a_longer_match_is_better_than_a_later_one() -> None:
    text = [9, 8, 1, 2, 30, 0, 7, 7, 1, 2, 31, 0, 9, 8, 1, 2]
    (draft,) = NgramDrafter().propose([context(text, limit=1)])
    assert draft.token_ids == [30]


def test_the_most_frequent_continuation_is_followed_with_its_share() -> None:
    text = [1, 2, 30, 1, 2, 40, 1, 2, 30, 1, 2, 30, 1, 2]
    (draft,) = SuffixDrafter().propose([context(text, limit=1)])
    assert draft.token_ids == [30]
    (sure,) = SuffixDrafter().propose([context([1, 2, 30, 1, 2, 30, 1, 2, 30, 1, 2], limit=1)])
    assert sure.confidences[0] > draft.confidences[0]


def test_min_match_is_kept() -> None:
    for min_match, is_found in ((3, True), (4, False)):
        for drafter in (NgramDrafter(min_match), SuffixDrafter(min_match)):
            (draft,) = drafter.propose([context([50, 1, 2, 3, 60, 61, 51, 1, 2, 3])])
            assert bool(draft.token_ids) == is_found


def test_a_growing_text_is_guessed_like_a_given_one() -> None:
    chooser = random.Random(0)
    text = [chooser.randrange(20) for _ in range(40)] * 3
    growing = context(text[:1])
    drafter = NgramDrafter()
    for token in text[1:]:
        growing.tokens.append(token)
        (draft,) = drafter.propose([growing])
        (fresh,) = NgramDrafter().propose([context(growing.tokens)])
        assert draft.token_ids == fresh.token_ids


def test_wrong_guesses_make_a_drafter_unsure_of_that_choice_alone() -> None:
    drafter = SuffixDrafter()
    good, bad = context([1, 2, 3, 4] * 3, number=1), context([1, 2, 3, 4] * 3, number=2)
    fresh_token = 1_000
    for _ in range(20):
        right, _ = drafter.propose([good, bad])
        good.tokens.append(right.token_ids[0])
        bad.tokens.append(fresh_token)
        fresh_token += 1
        bad.tokens.extend([1, 2, 3])
    right, wrong = drafter.propose([good, bad])
    assert right.confidences[0] > wrong.confidences[0]


def test_an_ended_output_is_guessed_for_its_tenant_and_for_nobody_else() -> None:
    drafter = SuffixDrafter()
    drafter.ended(context([1, 2, 3, *CYCLE], num_prompt_tokens=3, tenant="a", number=1))
    later = [context([70, 71, 5, 6, 7], tenant=name, number=9) for name in ("a", "b", "")]
    drafts = [drafter.propose([one])[0] for one in later]
    assert [draft.token_ids for draft in drafts] == [CYCLE[3:], [], []]


def test_the_beginning_of_an_answer_is_found_by_what_stood_before_it() -> None:
    drafter = SuffixDrafter()
    drafter.ended(context([90, 91, 92, *CYCLE], num_prompt_tokens=3, number=1))
    (draft,) = drafter.propose([context([40, 90, 91, 92], number=2)])
    assert draft.token_ids == CYCLE


def test_prompts_are_not_learned() -> None:
    drafter = SuffixDrafter()
    prompt = list(range(100, 150))
    drafter.ended(context([*prompt, 1], num_prompt_tokens=50, number=1))
    (draft,) = drafter.propose([context([7, 110, 111, 112], number=2)])
    assert draft.token_ids == []


def test_a_cancelled_choice_is_forgotten_and_teaches_nothing() -> None:
    drafter = SuffixDrafter()
    one = context([1, 2, *CYCLE], num_prompt_tokens=2, number=1)
    drafter.propose([one])
    drafter.forget(one.key)
    drafter.forget(one.key)
    assert len(drafter._choices) == 0
    (draft,) = drafter.propose([context([70, 5, 6, 7], number=2)])
    assert draft.token_ids == []


def test_without_room_nothing_is_learned() -> None:
    drafter = SuffixDrafter(tree_tokens=0)
    drafter.ended(context(CYCLE, num_prompt_tokens=0, number=1))
    (draft,) = drafter.propose([context([70, 5, 6, 7], number=2)])
    assert draft.token_ids == []


outputs = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=30), max_size=25)


@given(outputs, st.lists(st.integers(0, 4), min_size=4, max_size=10))
def test_an_evicted_output_counts_no_more(texts: list[list[int]], suffix: list[int]) -> None:
    max_tokens = 64
    past = PastOutputs((1, 2, 4), max_tokens)
    kept: list[list[int]] = []
    for text in texts:
        past.learn("a", array("I", text), 0)
        kept.append([*text, SEPARATOR])
        while sum(map(len, kept)) > max_tokens:
            kept.pop(0)
        index = past.index("a")
        assert index is not None
        assert past.num_tokens == sum(map(len, kept))
        assert len(index.tokens) <= 2 * max_tokens + 31
        fresh = PastOutputs((1, 2, 4), 1 << 20)
        for one in kept:
            fresh.learn("a", array("I", one[:-1]), 0)
        expected = fresh.index("a")
        assert expected is not None
        moved = index.first_token
        assert [
            (length, place - moved) for length, place in index.find(array("I", suffix), 1000, 8)
        ] == expected.find(array("I", suffix), 1000, 8)


def test_the_tenant_that_was_silent_longest_goes_first() -> None:
    past = PastOutputs((1, 2), 10)
    for number in range(40):
        past.learn(f"t{number}", array("I", range(9)), 0)
        past.learn("busy", array("I", range(9)), 0)
    assert past.index("busy") is not None
    assert past.index("t0") is None
    assert past.num_tokens <= 160


def test_tenants_that_said_little_are_bounded_too() -> None:
    past = PastOutputs((1, 2), 4_096)
    for number in range(100):
        past.learn(f"t{number}", array("I", [1, 2, 3]), 0)
    assert past.num_tenants == 64
    assert past.index("t35") is None
    assert past.index("t36") is not None


def test_an_output_longer_than_the_bound_is_cut() -> None:
    past = PastOutputs((1, 2), 10)
    past.learn("a", array("I", range(1_000)), 0)
    assert past.num_tokens == 10


def test_a_long_prompt_is_indexed_in_pieces_that_hold_up_no_step() -> None:
    chooser = random.Random(1)
    text = [chooser.randrange(40_000) for _ in range(100_000)]
    long = context([*text, *text[90_000:90_010]])
    drafter = SuffixDrafter()
    took_s, draft = [], Draft([], [], "")
    for _ in range(4):
        started_s = time.perf_counter()
        (draft,) = drafter.propose([long])
        took_s.append(time.perf_counter() - started_s)
    assert draft.token_ids == text[90_010:90_018]
    # A few milliseconds on a quiet machine.
    assert max(took_s) < 0.25


def test_pieces_are_shared_by_all_choices_of_a_call() -> None:
    indexes = ChoiceIndexes(anchor_lengths(2, 8))
    contexts = [context([3] * 30_000, number=number) for number in range(3)]
    added = [choice.index.num_added for choice in indexes.of(contexts)]
    assert added == [29_999, (1 << 15) - 29_999, 0]
    indexes.forget(contexts[0].key)
    assert len(indexes) == 2


def test_a_key_that_comes_back_with_other_text_is_indexed_anew() -> None:
    drafter = NgramDrafter()
    drafter.propose([context([1, 2, 3, 1, 2])])
    (draft,) = drafter.propose([context([4, 5, 6, 4, 5], limit=1)])
    assert draft.token_ids == [6]
