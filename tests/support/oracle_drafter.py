"""A drafter that knows what is right, and is so as often as it is told to be."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from twinfire.engine.drafters.drafter import ChoiceKey, Draft, DraftContext


class OracleDrafter:
    """Drafts the true output, each token replaced by a wrong one with chance `1 - accuracy`.

    `truth` returns all tokens that a choice will have output. Every choice that drafts were made
    for must have been ended or forgotten once the engine is done.
    """

    def __init__(
        self, truth: Callable[[ChoiceKey], Sequence[int]], accuracy: float, seed: int = 0
    ) -> None:
        self._truth = truth
        self._accuracy = accuracy
        self._random = random.Random(seed)
        self.known: set[ChoiceKey] = set()
        self.outputs: dict[ChoiceKey, list[int]] = {}
        """Of the choices that have ended."""

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        self.known.update(context.key for context in contexts)
        return [self._draft(context) for context in contexts]

    def ended(self, context: DraftContext) -> None:
        self.known.remove(context.key)
        self.outputs[context.key] = context.tokens[context.num_prompt_tokens :].tolist()

    def forget(self, key: ChoiceKey) -> None:
        self.known.discard(key)

    def _draft(self, context: DraftContext) -> Draft:
        num_output = len(context.tokens) - context.num_prompt_tokens
        count = self._random.randint(0, context.limit)
        right = list(self._truth(context.key)[num_output : num_output + count])
        tokens = [
            token if self._random.random() < self._accuracy else max(token - 1, 0) or 1
            for token in right
        ]
        return Draft(tokens, [self._accuracy] * len(tokens), "oracle")
