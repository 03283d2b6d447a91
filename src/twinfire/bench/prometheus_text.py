"""The few numbers that a test needs of a `/metrics` page."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client.parser import text_string_to_metric_families


def metric_sum(page: str, name: str) -> float | None:
    """Return a metric summed over its label sets, None when the page lacks it.

    `name` is the sample's full name, such as `twinfire:num_requests_running`.
    """
    values = [
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name
    ]
    return sum(values) if values else None


def metric_values(page: str, name: str, labels: Sequence[str]) -> dict[tuple[str, ...], float]:
    """Return a metric's values by those of its labels, in the page's order."""
    return {
        tuple(sample.labels.get(label, "") for label in labels): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name
    }
