"""A report as a picture. matplotlib is loaded only here, when a plot is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from twinfire.bench.distribution import Distribution
from twinfire.bench.load_report import LoadReport
from twinfire.protocol.errors import TwinfireError

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class PlotUnavailable(TwinfireError):
    """matplotlib is not installed; the message says how to get it."""


def check_plotting() -> None:
    """Raise PlotUnavailable early, before a long run, when plots cannot be made."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise PlotUnavailable(
            "plots need matplotlib: install the extra with pip install 'twinfire[bench]'"
        ) from None


def write_plot(report: LoadReport, path: Path) -> None:
    """Draw TTFT and ITL as cumulative shares, TTFT over time, and rates or tokens by phase.

    The format follows the file's suffix; PlotUnavailable without matplotlib.
    """
    check_plotting()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    figure.suptitle(f"{report.scenario}: {report.model}, {report.started_at}")
    ((ttft_axes, itl_axes), (time_axes, phase_axes)) = figure.subplots(2, 2)
    for phase in report.phases:
        ttfts = [row.ttft_ms for row in phase.requests if row.ttft_ms is not None]
        _cumulative(ttft_axes, ttfts, phase.name)
        _cumulative(itl_axes, phase.itl_gaps_ms, phase.name)
        shown = [row for row in phase.requests if row.ttft_ms is not None]
        time_axes.plot(
            [row.start_ms / 1e3 for row in shown],
            [row.ttft_ms for row in shown],
            ".",
            label=phase.name,
        )
    _label(ttft_axes, "TTFT, ms", "share of requests")
    _label(itl_axes, "gap between arrivals (ITL), ms", "share of gaps")
    _label(time_axes, "request sent, s", "TTFT, ms")
    _by_phase(phase_axes, report)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _cumulative(axes: Axes, values: list[float], label: str) -> None:
    if values:
        ascending = sorted(values)
        shares = [(index + 1) / len(ascending) for index in range(len(ascending))]
        axes.step(ascending, shares, where="post", label=label)


def _by_phase(axes: Axes, report: LoadReport) -> None:
    names = [phase.name for phase in report.phases]
    positions = range(len(names))
    axes.bar(positions, [phase.metrics.output_tokens_per_s for phase in report.phases], color="0.8")
    axes.set_xticks(positions, names)
    axes.set_ylabel("output tokens/s (bars)")
    latency_axes = axes.twinx()
    for percent in ("p50", "p99"):
        values = [_of(phase.metrics.ttft_ms, percent) for phase in report.phases]
        latency_axes.plot(positions, values, "o-", label=f"TTFT {percent}")
    latency_axes.set_ylabel("TTFT, ms (lines)")
    latency_axes.set_ylim(bottom=0)
    latency_axes.legend(fontsize="small")


def _of(values: Distribution | None, name: str) -> float:
    return float("nan") if values is None else float(getattr(values, name))


def _label(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")
