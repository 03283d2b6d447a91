"""Whether an output loops, and how much of it stood in its input.

Speculation looks splendid on a model that says one sentence for ever, so such outputs count for
nothing. Texts are compared by words and signs, not by a model's tokens: any server's answers can
be judged.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

LOOP_WORDS = 8
LOOP_REPEATS = 5
REPEAT_WORDS = 4
_WORDS = re.compile(r"\w+|[^\w\s]|\n|[ \t]{16}")


def loops(given: str, output: str) -> bool:
    """Return whether `output` has LOOP_WORDS in a row more than LOOP_REPEATS times over `given`."""
    before = Counter(_runs(given, LOOP_WORDS))
    counts = Counter(_runs(output, LOOP_WORDS))
    return any(count - before[run] > LOOP_REPEATS for run, count in counts.items())


def repeated_share(given: str, output: str) -> float:
    """Return the share of the output's runs of REPEAT_WORDS that stand in `given`, 0 to 1."""
    before = set(_runs(given, REPEAT_WORDS))
    runs = list(_runs(output, REPEAT_WORDS))
    return sum(run in before for run in runs) / len(runs) if runs else 0.0


def _runs(text: str, length: int) -> Iterator[tuple[str, ...]]:
    words = _WORDS.findall(text)
    return zip(*(words[start:] for start in range(length)), strict=False)
