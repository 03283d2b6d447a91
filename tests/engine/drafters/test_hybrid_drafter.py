"""Which of two drafters is taken."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from twinfire.engine.drafters.calibration import Calibration
from twinfire.engine.drafters.drafter import ChoiceKey, Draft, DraftContext
from twinfire.engine.drafters.hybrid import HybridDrafter
from twinfire.engine.drafters.make_drafter import make_drafter
from twinfire.protocol.speculation import parse_speculation

KEY = ("g", 1, 0)


class FixedDrafter:
    """Guesses the same for every context, and keeps what it was told."""

    def __init__(self, token_ids: list[int], confidence: float, source: str) -> None:
        self.draft = Draft(token_ids, [confidence] * len(token_ids), source)
        self.asked: list[int] = []
        self.told: list[ChoiceKey] = []

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        self.asked.append(len(contexts))
        return [self.draft for _ in contexts]

    def ended(self, context: DraftContext) -> None:
        self.told.append(context.key)

    def forget(self, key: ChoiceKey) -> None:
        self.told.append(key)


def context(tokens: Sequence[int] = (1, 2, 3), limit: int = 8, number: int = 1) -> DraftContext:
    return DraftContext(("g", number, 0), array("I", tokens), len(tokens), "", (), limit)


def test_the_second_guesses_where_the_first_has_nothing() -> None:
    first, second = FixedDrafter([], 0.9, "suffix"), FixedDrafter([4], 0.5, "eagle3")
    assert HybridDrafter(first, second, Calibration()).propose([context()]) == [second.draft]


def test_the_second_costs_nothing_where_the_first_brings_more() -> None:
    first, second = FixedDrafter([1] * 8, 0.9, "suffix"), FixedDrafter([4] * 3, 0.6, "eagle3")
    hybrid = HybridDrafter(first, second, Calibration())
    assert hybrid.propose([context(), context()]) == [first.draft] * 2
    assert second.asked == []


def test_a_first_that_is_sure_without_reason_gives_way_once_that_is_known() -> None:
    first, second = FixedDrafter([1] * 8, 0.95, "suffix"), FixedDrafter([4] * 3, 0.6, "eagle3")
    calibration = Calibration()
    hybrid = HybridDrafter(first, second, calibration)
    taken = []
    for _ in range(40):
        (draft,) = hybrid.propose([context()])
        taken.append(draft.source)
        num_accepted = 0 if draft.source == "suffix" else 2
        calibration.note(draft.source, draft.confidences, num_accepted)
    assert taken[0] == "suffix"
    assert set(taken[-20:]) == {"eagle3"}


def test_each_choice_gets_the_better_of_its_own_drafts() -> None:
    calibration = Calibration()
    for _ in range(40):
        calibration.note("eagle3", [0.7] * 3, 2)
    options = parse_speculation("hybrid")
    head = FixedDrafter([4] * 3, 0.7, "eagle3")
    drafter = make_drafter(options, calibration, head)
    repeating = context([*range(20, 60), *range(20, 45)], number=1)
    drafts = drafter.propose([repeating, context(range(30), number=2)])
    assert [draft.source for draft in drafts] == ["suffix", "eagle3"]
    none_wanted = context(range(30), limit=0, number=3)
    assert drafter.propose([none_wanted])[0].token_ids in ([], [4] * 3)


def test_both_are_told_of_an_end() -> None:
    first, second = FixedDrafter([], 0, "a"), FixedDrafter([], 0, "b")
    hybrid = HybridDrafter(first, second, Calibration())
    hybrid.ended(context())
    hybrid.forget(KEY)
    assert first.told == second.told == [KEY, KEY]


def test_a_prediction_is_followed_by_every_method() -> None:
    for method in ("ngram", "suffix", "eagle3", "hybrid"):
        head = FixedDrafter([4], 0.5, "eagle3") if method in ("eagle3", "hybrid") else None
        drafter = make_drafter(parse_speculation(method), Calibration(), head)
        one = DraftContext(KEY, array("I", [1, 2]), 2, "", [7, 8, 9], 8)
        assert drafter.propose([one])[0].token_ids == [7, 8, 9]


def test_hybrid_without_a_head_is_suffix() -> None:
    drafter = make_drafter(parse_speculation("hybrid"), Calibration(), None)
    (draft,) = drafter.propose([context([1, 2, 3, 4, 1, 2])])
    assert draft.source == "suffix"
    assert draft.token_ids[:2] == [3, 4]
