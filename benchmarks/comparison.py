"""What a comparison found, and its Markdown table. Holds no prompt, answer or path of a machine."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from twinfire.bench.distribution import Distribution, median
from twinfire.bench.load_metrics import LoadMetrics
from twinfire.bench.machine import Machine
from twinfire.bench.parameters import Parameter
from twinfire.bench.report_table import markdown_table


class ServerUnderTest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    command: str
    url: str | None = None
    model: str | None = None
    version_command: str | None = None
    extra_body: dict[str, Parameter] = {}
    version: str | None = None


class Run(msgspec.Struct, frozen=True):
    """One scenario in one life of one server."""

    server: str
    index: int
    scenario: str
    parameters: dict[str, Parameter]
    foreign_cpu: float
    """Share of all cores that other processes took, 0 to 1."""
    load_average_1m: float
    server_cores_used: float
    ready_s: float
    peak_rss_bytes: int
    """From ready to the end of this scenario, over the server's process tree."""
    model: str
    server_version: str | None
    notes: list[str]
    phases: dict[str, LoadMetrics]


class Comparison(msgspec.Struct, frozen=True):
    started_at: str
    ended_at: str
    command: str
    machine: Machine
    load_average_before: float
    seed: int
    max_foreign_cpu: float
    runs_thrown_away: int
    servers: list[ServerUnderTest]
    runs: list[Run]


def _of(name: str, which: str) -> Callable[[LoadMetrics], float | None]:
    def value(metrics: LoadMetrics) -> float | None:
        described: Distribution | None = getattr(metrics, name)
        return None if described is None else getattr(described, which)

    return value


FIGURES: dict[str, Callable[[LoadMetrics], float | None]] = {
    "output tok/s": lambda metrics: metrics.output_tokens_per_s,
    "total tok/s": lambda metrics: metrics.total_tokens_per_s,
    "TTFT P50 ms": _of("ttft_ms", "p50"),
    "TTFT P90 ms": _of("ttft_ms", "p90"),
    "TPOT P50 ms": _of("tpot_ms", "p50"),
    "ITL P50 ms": _of("itl_ms", "p50"),
    "ITL P90 ms": _of("itl_ms", "p90"),
    "ITL P99 ms": _of("itl_ms", "p99"),
    "ITL max ms": _of("itl_ms", "max"),
    "E2E P50 ms": _of("e2e_ms", "p50"),
    "cached tokens": lambda metrics: metrics.cached_tokens,
    "failed": lambda metrics: metrics.requests - metrics.completed,
}

PROCESS_FIGURES: dict[str, Callable[[Run], float | None]] = {
    "cores used": lambda run: run.server_cores_used,
    "ready s": lambda run: run.ready_s,
    "peak RSS MB": lambda run: run.peak_rss_bytes / 1e6,
    "foreign CPU %": lambda run: run.foreign_cpu * 100,
}


def markdown(comparison: Comparison) -> str:
    names = [server.name for server in comparison.servers]
    header = ["", *names, *(f"{name} / {names[0]}" for name in names[1:])]
    parts = [_heading(comparison)]
    for scenario in dict.fromkeys(run.scenario for run in comparison.runs):
        runs = [run for run in comparison.runs if run.scenario == scenario]
        parameters = ", ".join(f"{k} {v}" for k, v in runs[0].parameters.items())
        parts.append(f"\n## {scenario}\n\n{parameters}. Medians of runs.\n\n")
        parts.append(markdown_table(header, _rows(runs, names)))
        notes = dict.fromkeys(f"{run.server}: {n}" for run in runs for n in run.notes)
        parts += [f"\n* {text}" for text in notes]
        parts.append("\n" if notes else "")
    return "".join(parts)


def _heading(comparison: Comparison) -> str:
    machine = comparison.machine
    memory = "" if machine.memory_bytes is None else f", {machine.memory_bytes / 2**30:.0f} GiB"
    lines = [
        f"# {' against '.join(server.name for server in comparison.servers)}\n",
        f"{comparison.started_at} to {comparison.ended_at}. {machine.cpu}, {machine.cores} cores"
        f"{memory}, {machine.kernel}. Load average before: {comparison.load_average_before:.2f}; "
        f"runs thrown away because others took more than {comparison.max_foreign_cpu:.0%} of the "
        f"cores: {comparison.runs_thrown_away}. Seed {comparison.seed}.\n",
    ]
    for server in comparison.servers:
        versions = {run.server_version for run in comparison.runs if run.server == server.name}
        found = [version for version in versions if version]
        version = server.version or (found[0] if found else "version unknown")
        lines.append(f"* {server.name} ({version}): `{server.command}`")
    return "\n".join(lines) + "\n"


def _rows(runs: list[Run], names: list[str]) -> list[list[str]]:
    rows: list[list[str]] = []
    phases = dict.fromkeys(name for run in runs for name in run.phases)
    for phase in phases:
        prefix = f"{phase}: " if len(phases) > 1 else ""
        for label, figure in FIGURES.items():
            by_server = [
                [figure(run.phases[phase]) for run in runs if run.server == name] for name in names
            ]
            rows.append([prefix + label, *_cells(by_server)])
    for label, of_run in PROCESS_FIGURES.items():
        by_server = [[of_run(run) for run in runs if run.server == name] for name in names]
        rows.append([label, *_cells(by_server)])
    return [row for row in rows if any(cell != "-" for cell in row[1:])]


def _cells(by_server: list[list[float | None]]) -> list[str]:
    """Medians, then ratios to the first; a server that lacks a value in any run gets no median."""
    medians = [
        median([value for value in values if value is not None])
        if values and None not in values
        else None
        for values in by_server
    ]
    first = medians[0]
    ratios = [
        f"{value / first:.2f}" if value is not None and first else "-" for value in medians[1:]
    ]
    return ["-" if value is None else f"{value:.4g}" for value in medians] + ratios
