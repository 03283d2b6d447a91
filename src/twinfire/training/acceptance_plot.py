"""The acceptance curve as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from twinfire.protocol.errors import InvalidRequest
from twinfire.training.acceptance import AcceptanceCurve


def plot_acceptance(curves: Mapping[str, AcceptanceCurve], path: Path) -> None:
    """Draw each domain's rate by position; InvalidRequest when matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidRequest(
            "a plot needs matplotlib: pip install 'twinfire[bench]'", "plot"
        ) from None
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    for name, curve in curves.items():
        rates = curve.rates()
        label = f"{name}: {curve.length(len(rates)):.2f} tokens per step"
        axes.plot(range(1, len(rates) + 1), rates, marker="o", label=label)
    axes.set(xlabel="position of the draft", ylabel="accepted, where the ones before were")
    axes.set_ylim(0, 1)
    axes.set_xticks(
        range(1, 1 + max((len(curve.num_reached) for curve in curves.values()), default=1))
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
