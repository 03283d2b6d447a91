"""Keeps a fault of a drafter from the requests that it drafts for: they go on without drafts."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from twinfire.engine.drafters.drafter import ChoiceKey, Draft, DraftContext, Drafter

log = logging.getLogger(__name__)


class GuardedDrafter:
    """Asks a drafter no more for choices that it failed for, and logs why."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._barred: set[ChoiceKey] = set()

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """Return one draft per context; empty where the drafter has failed."""
        asked = [context for context in contexts if context.key not in self._barred]
        try:
            drafts = self._drafter.propose(asked)
            if len(drafts) != len(asked):
                raise ValueError(f"{len(drafts)} drafts came for {len(asked)} choices")
        except Exception:
            log.exception("a drafter failed; %d choices go on without drafts", len(asked))
            for context in asked:
                self._bar(context.key)
            return [Draft([], [], "none") for _ in contexts]
        if len(asked) == len(contexts):
            return drafts
        made = iter(drafts)
        return [
            Draft([], [], "none") if context.key in self._barred else next(made)
            for context in contexts
        ]

    def ended(self, context: DraftContext) -> None:
        """Let the drafter learn the output, unless it failed for it."""
        if context.key in self._barred:
            self._barred.remove(context.key)
            return
        try:
            self._drafter.ended(context)
        except Exception:
            log.exception("a drafter failed to learn an output")

    def forget(self, key: ChoiceKey) -> None:
        """Drop the choice."""
        self._barred.discard(key)
        self._forget_guarded(key)

    def _bar(self, key: ChoiceKey) -> None:
        self._barred.add(key)
        self._forget_guarded(key)

    def _forget_guarded(self, key: ChoiceKey) -> None:
        try:
            self._drafter.forget(key)
        except Exception:
            log.exception("a drafter failed to forget a choice")
