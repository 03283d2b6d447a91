"""What speculation drafted and what of it was accepted, as Prometheus counters of one model.

Names are those that the field's dashboards know. Tokens a step of one choice, the acceptance
length, are 1 + accepted tokens / drafts.
"""

from __future__ import annotations

from itertools import zip_longest

from prometheus_client import CollectorRegistry, Counter

from twinfire.protocol.messages import Load


class DraftCounters:
    """Belongs to the event loop's thread."""

    def __init__(self, prefix: str, model_name: str, registry: CollectorRegistry) -> None:
        self._model_name = model_name

        def counter(name: str, text: str, *labels: str) -> Counter:
            name = f"{prefix}spec_decode_num_{name}"
            return Counter(name, text, ("model_name", *labels), registry=registry)

        self._drafts = counter("drafts", "Times that a choice had drafts in a step").labels(
            model_name
        )
        self._drafted = counter("draft_tokens", "Draft tokens verified").labels(model_name)
        self._accepted = counter("accepted_tokens", "Draft tokens accepted").labels(model_name)
        self._drafted_by_position = counter(
            "draft_tokens_per_pos", "Draft tokens verified, by position from 0", "position"
        )
        self._accepted_by_position = counter(
            "accepted_tokens_per_pos", "Draft tokens accepted, by position from 0", "position"
        )

    def count(self, load: Load, counted: Load) -> None:
        """Add what a worker's report has beyond an earlier one of the same life."""
        drafted = _gained(load.drafted, counted.drafted)
        accepted = _gained(load.accepted, counted.accepted)
        self._drafts.inc(drafted[0] if drafted else 0)
        self._drafted.inc(sum(drafted))
        self._accepted.inc(sum(accepted))
        for by_position, gained in (
            (self._drafted_by_position, drafted),
            (self._accepted_by_position, accepted),
        ):
            for position, num_tokens in enumerate(gained):
                by_position.labels(self._model_name, str(position)).inc(num_tokens)


def _gained(now: tuple[int, ...], before: tuple[int, ...]) -> list[int]:
    return [max(0, later - sooner) for later, sooner in zip_longest(now, before, fillvalue=0)]
