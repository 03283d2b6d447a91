"""One choice's output against its grammar, ends included."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from twinfire.artifacts.token_grammar import AllowedTokens, CompiledGrammar
from twinfire.engine.drafters.drafter import Draft
from twinfire.protocol.errors import InvalidRequest

GRAMMAR_SOURCE = "grammar"
"""Of drafts that a grammar leaves no choice for."""
_FORCED_CONFIDENCE = 0.9
"""The model may write the same text in other tokens."""


class ChoiceGrammar:
    """Follows the tokens of one choice.

    `ending_token_ids` end the choice, so they may be drawn just where the output is complete,
    whatever the grammar says of them. `output` is replayed; InvalidRequest when it does not match.
    """

    def __init__(
        self, compiled: CompiledGrammar, ending_token_ids: Iterable[int], output: Iterable[int]
    ) -> None:
        self._matcher = compiled.matcher()
        ending_ids = np.fromiter(ending_token_ids, np.int64)
        self._ending_words = ending_ids // 32
        self._ending_bits = np.left_shift(np.uint32(1), (ending_ids % 32).astype(np.uint32))
        for position, token_id in enumerate(output):
            if not self._matcher.accept(token_id):
                raise InvalidRequest(
                    f"outputs: token {token_id} at {position} does not match the grammar",
                    param="outputs",
                )

    def allowed(self) -> AllowedTokens:
        """Return the tokens that may be drawn next, one bit each."""
        row = self._matcher.allowed()
        if self._matcher.may_end:
            np.bitwise_or.at(row, self._ending_words, self._ending_bits)
        else:
            np.bitwise_and.at(row, self._ending_words, ~self._ending_bits)
        return row

    def fit(self, draft: Draft, limit: int) -> Draft:
        """Return a draft that the grammar allows, of at most `limit` tokens.

        Text that must come is drafted whoever guesses otherwise, in its usual tokens; else `draft`
        is cut where it breaks the grammar.
        """
        forced = self._matcher.forced()[:limit]
        if forced:
            return Draft(forced, [_FORCED_CONFIDENCE] * len(forced), GRAMMAR_SOURCE)
        return draft.first(self._matcher.num_allowed(draft.token_ids))

    def accept(self, token_id: int) -> bool:
        """Add a drawn token that does not end the choice; False when the grammar broke down."""
        return self._matcher.accept(token_id)

    def rollback(self, num_tokens: int) -> None:
        """Take back the last `num_tokens` accepted tokens."""
        self._matcher.rollback(num_tokens)

    @property
    def may_end(self) -> bool:
        """Whether the output is complete as it is."""
        return self._matcher.may_end

    @property
    def is_done(self) -> bool:
        """Whether the output is complete and nothing can be added."""
        return self._matcher.is_done

    @property
    def failure(self) -> str:
        """Why the matching broke down, empty if it did not."""
        return self._matcher.failure
