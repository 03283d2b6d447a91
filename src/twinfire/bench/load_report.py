"""The result of a run as one value: what was run, against what, and what was measured.

Owns the JSON file. Never holds prompts or answers: a report may be published.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from twinfire.bench.load_metrics import (
    LoadMetrics,
    Objectives,
    e2e_ms,
    itl_gaps_ms,
    load_metrics,
    tpot_ms,
    ttft_ms,
)
from twinfire.bench.machine import Machine
from twinfire.bench.parameters import Parameter
from twinfire.bench.workloads import Phase


class RequestRow(msgspec.Struct, frozen=True):
    """One request in the JSON file. Times in ms, the start relative to the run's."""

    label: str
    start_ms: float
    ttft_ms: float | None
    tpot_ms: float | None
    e2e_ms: float
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int
    finish_reason: str | None
    error_kind: str | None
    error_message: str


class PhaseReport(msgspec.Struct, frozen=True):
    """One part of a run."""

    name: str
    metrics: LoadMetrics
    by_label: dict[str, LoadMetrics]
    """The same for each kind of request, where a phase has several."""
    requests: list[RequestRow]
    itl_gaps_ms: list[float]


class LoadReport(msgspec.Struct, frozen=True):
    """A whole run."""

    scenario: str
    parameters: dict[str, Parameter]
    url: str
    api: str
    model: str
    server_version: str | None
    client_version: str
    machine: Machine
    """Where the client ran."""
    started_at: str
    """UTC, ISO 8601."""
    seed: int
    notes: list[str]
    objectives: Objectives
    phases: list[PhaseReport]


def phase_reports(phases: Sequence[Phase], objectives: Objectives) -> list[PhaseReport]:
    """Summarise what a workload returned."""
    starts = [record.started_s for phase in phases for record in phase.records]
    origin_s = min(starts, default=0.0)
    return [_phase_report(phase, objectives, origin_s) for phase in phases]


def _phase_report(phase: Phase, objectives: Objectives, origin_s: float) -> PhaseReport:
    labels = sorted({record.label for record in phase.records})
    by_label = {
        label: load_metrics(
            [record for record in phase.records if record.label == label],
            objectives,
            phase.window_s,
        )
        for label in labels
        if len(labels) > 1
    }
    rows = [
        RequestRow(
            label=record.label,
            start_ms=(record.started_s - origin_s) * 1e3,
            ttft_ms=ttft_ms(record),
            tpot_ms=tpot_ms(record),
            e2e_ms=e2e_ms(record),
            prompt_tokens=record.prompt_tokens,
            cached_tokens=record.cached_tokens,
            output_tokens=record.output_tokens,
            finish_reason=record.finish_reason,
            error_kind=record.error_kind,
            error_message=record.error_message,
        )
        for record in phase.records
    ]
    gaps = [
        round(gap, 3)
        for record in phase.records
        if record.completed
        for gap in itl_gaps_ms(record, phase.window_s)
    ]
    metrics = load_metrics(phase.records, objectives, phase.window_s)
    return PhaseReport(phase.name, metrics, by_label, rows, gaps)


def reading_notes(
    phases: Sequence[PhaseReport], wanted_prompt_tokens: Mapping[str, int]
) -> list[str]:
    """Return what a reader must know before trusting the numbers.

    `wanted_prompt_tokens` says by phase what prompt length was asked for, where it was one.
    """
    notes = []
    for phase in phases:
        metrics = phase.metrics
        if metrics.errors_by_kind:
            failed = metrics.requests - metrics.completed
            notes.append(
                f"{phase.name}: {failed} of {metrics.requests} requests failed and are not in the "
                f"latencies: {', '.join(f'{k} {n}' for k, n in metrics.errors_by_kind.items())}"
            )
        if metrics.ended_early:
            notes.append(
                f"{phase.name}: {metrics.ended_early} answers ended before the fixed output "
                "length: the server does not honour ignore_eos, so rates are not comparable"
            )
        if metrics.without_usage:
            notes.append(
                f"{phase.name}: {metrics.without_usage} answers came without usage; "
                "their tokens were counted as chunks"
            )
        wanted, got = wanted_prompt_tokens.get(phase.name), metrics.prompt_tokens_each
        if wanted and got and max(got.max - wanted, wanted - got.min) > 0.02 * wanted:
            notes.append(
                f"{phase.name}: prompts of {got.min:.0f} to {got.max:.0f} tokens, not {wanted}"
            )
    return notes


def write_json(report: LoadReport, path: Path) -> None:
    """Write the report, creating folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


def read_json(path: Path) -> LoadReport:
    """Read what `write_json` wrote."""
    return msgspec.json.decode(path.read_bytes(), type=LoadReport)
