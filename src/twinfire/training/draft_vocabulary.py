"""Which of the target's tokens a draft head can propose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from twinfire.protocol.errors import InvalidRequest
from twinfire.training.sample import Sample


def frequent_tokens(
    samples: Iterable[Sample], count: int, vocab_size: int, always: Sequence[int] = ()
) -> npt.NDArray[np.int64]:
    """Return the `count` tokens that answers hold most often, ascending.

    Tokens of `always` are among them. Prompts fill up what answers leave.
    """
    if not len(always) < count <= vocab_size:
        raise InvalidRequest(
            f"the draft vocabulary must have {len(always) + 1} to {vocab_size} tokens, got {count}"
        )
    in_answers: Counter[int] = Counter()
    in_prompts: Counter[int] = Counter()
    for sample in samples:
        in_prompts.update(sample.tokens[: sample.answer_start])
        in_answers.update(sample.tokens[sample.answer_start :])
    ranked = dict.fromkeys(always)
    for counter in (in_answers, in_prompts):
        ranked.update(dict.fromkeys(token for token, _ in counter.most_common()))
    ranked.update(dict.fromkeys(range(vocab_size)))
    return np.sort(np.fromiter(ranked, np.int64, len(ranked))[:count])
