"""A report for the terminal, and the same figures as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from twinfire.bench.distribution import Distribution
from twinfire.bench.load_metrics import LoadMetrics
from twinfire.bench.load_report import LoadReport, PhaseReport

LATENCY_COLUMNS = ("mean", "p50", "p90", "p99", "max")


def report_view(report: LoadReport) -> RenderableType:
    """Return what the terminal shows of a report."""
    heading = f"{report.scenario} · {report.model} at {report.url}"
    parts: list[RenderableType] = [Text(heading, style="bold")]
    parts += [_rates_table(report.phases), _latency_table(report.phases)]
    parts += [Text(f"note: {note}", style="yellow") for note in report.notes]
    parts.append(Text(f"seed {report.seed}", style="dim"))
    return Group(*parts)


def print_report(console: Console, report: LoadReport) -> None:
    """Print a report."""
    console.print(report_view(report))


def _rows_of(phases: Sequence[PhaseReport]) -> list[tuple[str, LoadMetrics]]:
    rows: list[tuple[str, LoadMetrics]] = []
    for phase in phases:
        rows.append((phase.name, phase.metrics))
        rows += [(f"  {label}", metrics) for label, metrics in phase.by_label.items()]
    return rows


def _rates_table(phases: Sequence[PhaseReport]) -> Table:
    table = Table(box=None, pad_edge=False, collapse_padding=True, header_style="bold cyan")
    rows = _rows_of(phases)
    with_goodput = any(metrics.goodput_per_s is not None for _, metrics in rows)
    # Short names: the table fits 80 columns, which is also what a pipe gets.
    columns = ["", "ok", "time s", "in tok", "cached", "out tok", "req/s", "out tok/s", "all tok/s"]
    columns += ["good/s", "good"] if with_goodput else []
    for column in columns:
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for name, metrics in rows:
        cells = [
            name,
            f"{metrics.completed}/{metrics.requests}",
            f"{metrics.duration_s:.2f}",
            str(metrics.prompt_tokens),
            "-" if metrics.cached_tokens is None else str(metrics.cached_tokens),
            str(metrics.output_tokens),
            f"{metrics.requests_per_s:.2f}",
            f"{metrics.output_tokens_per_s:.1f}",
            f"{metrics.total_tokens_per_s:.0f}",
        ]
        if with_goodput:
            share = metrics.goodput_share
            cells.append(_number(metrics.goodput_per_s))
            cells.append("-" if share is None else f"{share:.0%}")
        table.add_row(*cells)
    return table


def _latency_table(phases: Sequence[PhaseReport]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold cyan")
    for column in ("", "ms", *LATENCY_COLUMNS):
        table.add_column(column, justify="left" if column in ("", "ms") else "right", no_wrap=True)
    for name, metrics in _rows_of(phases):
        shown = name
        for label, values in latencies(metrics):
            if values is not None:
                table.add_row(shown, label, *latency_cells(values))
                shown = ""
        if metrics.tokens_per_arrival is not None and metrics.tokens_per_arrival > 1.05:
            table.add_row("", f"({metrics.tokens_per_arrival:.2f} tokens per arrival)")
    return table


def latencies(metrics: LoadMetrics) -> list[tuple[str, Distribution | None]]:
    """Return the four latencies with their short names, in ms."""
    return [
        ("TTFT", metrics.ttft_ms),
        ("ITL (gaps)", metrics.itl_ms),
        ("TPOT", metrics.tpot_ms),
        ("E2E", metrics.e2e_ms),
    ]


def latency_cells(values: Distribution) -> list[str]:
    """Return the cells of LATENCY_COLUMNS."""
    return [_number(getattr(values, column)) for column in LATENCY_COLUMNS]


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, first column left and the others right."""
    rule = ["---"] + ["---:"] * (len(header) - 1)
    lines = [header, rule, *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
