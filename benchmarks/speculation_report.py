"""Figures of the benchmark of speculation, and its Markdown. Holds no prompt, answer or path.

Tokens per second are those of a stream (tokens of all kept answers over the seconds of all kept
requests, prompts included) times the number of streams (of tasks, where those are fewer), so
requests that are left out take nothing of the others' figures with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from speculation_run import Outcome, ScenarioRun, Screening
from speculation_tasks import FAMILIES, LEAST
from twinfire.bench.distribution import median
from twinfire.bench.machine import Machine
from twinfire.bench.report_table import markdown_table

FRESH_SHARE = 0.2
"""An output repeats nothing when at most this share of it stood in its input."""


class Column(msgspec.Struct, frozen=True):
    """One server: an engine, a format of weights and a method of speculation."""

    engine: str
    format: str
    method: str
    command: str
    model: str | None = None
    families: tuple[str, ...] = tuple(FAMILIES)

    @property
    def name(self) -> str:
        return f"{self.engine} {self.format} {self.method}"

    @property
    def group(self) -> tuple[str, str]:
        """Columns whose ratios are to the same baseline, the one whose method is off."""
        return self.engine, self.format


class SpeculationReport(msgspec.Struct, frozen=True):
    started_at: str
    ended_at: str
    command: str
    machine: Machine
    load_average_before: float
    max_foreign_cpu: float
    runs_thrown_away: int
    columns: list[Column]
    versions: dict[str, str]
    """By engine."""
    screenings: dict[str, dict[str, Screening]]
    """By format and family."""
    runs: list[ScenarioRun]


Place = tuple[int, int, int]
"""Round, task and turn."""


class Scenario:
    """All runs of one family at one number of streams, in the columns of one group."""

    def __init__(self, columns: Sequence[Column], runs: Iterable[ScenarioRun]) -> None:
        self.runs: dict[str, list[ScenarioRun]] = {column.name: [] for column in columns}
        for run in runs:
            self.runs[run.column].append(run)
        self.runs = {name: runs for name, runs in self.runs.items() if runs}
        self.num_rejected: dict[str, int] = {}
        self.num_requests: dict[str, int] = {}
        refused: set[Place] = set()
        seen: list[set[Place]] = []
        for name, column_runs in self.runs.items():
            places = list(_places(column_runs))
            bad = {place for place, one in places if one.loops or one.error is not None}
            refused |= bad
            seen.append({place for place, _ in places})
            self.num_rejected[name], self.num_requests[name] = len(bad), len(places)
        self.kept = set.intersection(*seen) - refused if seen else set()

    def outcomes(self, column: str) -> list[Outcome]:
        """Return what is counted of a column."""
        return [one for place, one in _places(self.runs[column]) if place in self.kept]

    def rate(self, column: str, *, decode_only: bool = False) -> float | None:
        """Return output tokens per second, the median of rounds; None where nothing is kept."""
        rates = []
        for run in self.runs.get(column, []):
            kept = [one for place, one in _places([run]) if place in self.kept]
            if decode_only:
                tokens = sum(one.output_tokens - 1 for one in kept)
                seconds = sum(one.decode_seconds for one in kept)
            else:
                tokens = sum(one.output_tokens for one in kept)
                seconds = sum(one.seconds for one in kept)
            if seconds > 0:
                busy = min(run.streams, len({one.task for one in run.outcomes}))
                rates.append(busy * tokens / seconds)
        return median(rates) if rates else None

    def num_differing(self, column: str, baseline: str) -> int:
        """Return how many answers are not those of the baseline, kept or not."""
        known = {place: one.answer for place, one in _places(self.runs[baseline])}
        places = _places(self.runs[column])
        return sum(known.get(place, one.answer) != one.answer for place, one in places)

    def tokens_per_step(self, column: str) -> float | None:
        """Return output tokens per step of a sequence, over all requests of all rounds."""
        runs = self.runs[column]
        tokens = sum(one.output_tokens for run in runs for one in run.outcomes)
        steps = tokens - sum(run.accepted for run in runs)
        return tokens / steps if steps > 0 else None


def _places(runs: Iterable[ScenarioRun]) -> Iterable[tuple[Place, Outcome]]:
    for run in runs:
        for one in run.outcomes:
            yield (run.round, one.task, one.turn), one


def markdown(report: SpeculationReport) -> str:
    """Return the whole report."""
    formats = list(dict.fromkeys(column.format for column in report.columns))
    parts = [_heading(report)]
    for format_ in formats:
        parts.append(f"\n## {format_}\n\nOutput tokens/s, prompts included (ratio to off).\n\n")
        parts.append(_rates(report, format_, decode_only=False))
        parts.append("\nOf decoding alone, from the first token to the last one:\n\n")
        parts.append(_rates(report, format_, decode_only=True))
        parts.append("\nTokens per step of a sequence, and how many of the guesses were right:\n\n")
        parts.append(_acceptance(report, format_))
        parts.append("\nRequests left out in all columns of an engine because the output of one ")
        parts.append("loops or failed, of how many:\n\n")
        parts.append(_rejections(report, format_))
    parts += ["\n## Candidates\n\n", _screenings(report)]
    parts += ["\n## Against what was asked\n\n", _goals(report)]
    return "".join(parts)


def _heading(report: SpeculationReport) -> str:
    machine = report.machine
    memory = "" if machine.memory_bytes is None else f", {machine.memory_bytes / 2**30:.0f} GiB"
    rounds = 1 + max((run.round for run in report.runs), default=0)
    lines = [
        "# Speculation on and off\n",
        f"{report.started_at} to {report.ended_at}. {machine.cpu}, {machine.cores} cores{memory}, "
        f"{machine.kernel}. Load average before: {report.load_average_before:.2f}; runs thrown "
        f"away because others took more than {report.max_foreign_cpu:.0%} of the cores: "
        f"{report.runs_thrown_away}. {rounds} rounds, in each of which every server runs once as "
        "a fresh process; medians of rounds, ratios of medians. No process is asked the same "
        "twice.\n",
        f"    {report.command}\n",
    ]
    lines += [f"* {engine}: {version}" for engine, version in report.versions.items()]
    lines += [f"* {column.name}: `{column.command}`" for column in report.columns]
    return "\n".join(lines) + "\n"


def scenarios_of(
    report: SpeculationReport, group: tuple[str, str]
) -> dict[tuple[str, int], Scenario]:
    """Return a group's scenarios by family and number of streams."""
    columns = [column for column in report.columns if column.group == group]
    names = {column.name for column in columns}
    runs = [run for run in report.runs if run.column in names]
    keys = dict.fromkeys((run.family, run.streams) for run in runs)
    return {
        key: Scenario(columns, (run for run in runs if (run.family, run.streams) == key))
        for key in keys
    }


def _groups(report: SpeculationReport, format_: str) -> list[tuple[str, str]]:
    return list(dict.fromkeys(c.group for c in report.columns if c.format == format_))


def _by_column(report: SpeculationReport, format_: str) -> list[tuple[Column, dict]]:
    scenarios = {group: scenarios_of(report, group) for group in _groups(report, format_)}
    columns = [column for column in report.columns if column.format == format_]
    return [(column, scenarios[column.group]) for column in columns]


def _label(key: tuple[str, int]) -> str:
    return f"{key[0]}, {key[1]} stream{'s' if key[1] > 1 else ''}"


def _keys(columns: Sequence[tuple[Column, dict]]) -> list[tuple[str, int]]:
    return list(dict.fromkeys(key for _, scenarios in columns for key in scenarios))


def _off(column: Column) -> str:
    return msgspec.structs.replace(column, method="off").name


def ratio(scenario: Scenario, column: Column, *, decode_only: bool = False) -> float | None:
    """Return a column's rate over that of the same without speculation."""
    rate = scenario.rate(column.name, decode_only=decode_only)
    base = scenario.rate(_off(column), decode_only=decode_only)
    return rate / base if rate is not None and base else None


def _rates(report: SpeculationReport, format_: str, *, decode_only: bool) -> str:
    columns = _by_column(report, format_)

    def cell(column: Column, scenario: Scenario | None) -> str:
        rate = scenario and scenario.rate(column.name, decode_only=decode_only)
        if scenario is None or rate is None:
            return "-"
        if column.method == "off":
            return f"{rate:.1f}"
        over = ratio(scenario, column, decode_only=decode_only)
        return f"{rate:.1f} ({'-' if over is None else f'{over:.2f}'})"

    return _table(columns, cell)


def _acceptance(report: SpeculationReport, format_: str) -> str:
    columns = [(c, scenarios) for c, scenarios in _by_column(report, format_) if c.method != "off"]

    def cell(column: Column, scenario: Scenario | None) -> str:
        if scenario is None or column.name not in scenario.runs:
            return "-"
        runs, steps = scenario.runs[column.name], scenario.tokens_per_step(column.name)
        drafted = sum(run.drafted for run in runs)
        accepted = sum(run.accepted for run in runs)
        share = f"{accepted:.0f} of {drafted:.0f}" if drafted else "none tried"
        return f"{'-' if steps is None else f'{steps:.2f}'}, {share}"

    fresh: list[str] = []
    for column, scenarios in columns:
        outcomes = [
            one
            for scenario in scenarios.values()
            if column.name in scenario.runs
            for one in scenario.outcomes(column.name)
        ]
        fresh.append(_fresh_cell([one for one in outcomes if one.repeated <= FRESH_SHARE]))
    return _table(
        columns, cell, [f"all answers that repeat at most {FRESH_SHARE:.0%} of their input", *fresh]
    )


def _fresh_cell(outcomes: Sequence[Outcome]) -> str:
    known = [one for one in outcomes if one.accepted is not None and one.rejected is not None]
    if not known:
        return "-"
    tokens = sum(one.output_tokens for one in known)
    accepted = sum(one.accepted or 0 for one in known)
    drafted = accepted + sum(one.rejected or 0 for one in known)
    return f"{tokens / max(tokens - accepted, 1):.2f}, {accepted} of {drafted}"


def _rejections(report: SpeculationReport, format_: str) -> str:
    columns = _by_column(report, format_)

    def cell(column: Column, scenario: Scenario | None) -> str:
        if scenario is None or column.name not in scenario.runs:
            return "-"
        text = f"{scenario.num_rejected[column.name]}/{scenario.num_requests[column.name]}"
        if column.method != "off":
            differing = scenario.num_differing(column.name, _off(column))
            text += f", {differing} answers differ" if differing else ""
        return text

    return _table(columns, cell)


def _table(
    columns: Sequence[tuple[Column, dict]],
    cell: Callable[[Column, Scenario | None], str],
    *last_rows: Sequence[str],
) -> str:
    """Return a row for each scenario and a column for each server, then the last rows."""
    rows = [
        [_label(key), *(cell(column, scenarios.get(key)) for column, scenarios in columns)]
        for key in _keys(columns)
    ]
    header = ["", *(f"{column.engine} {column.method}" for column, _ in columns)]
    return markdown_table(header, [*rows, *last_rows])


def _screenings(report: SpeculationReport) -> str:
    rows = [
        [
            f"{format_} {family}",
            *(str(number) for number in (found.tried, found.looping, found.not_done)),
            str(len(found.kept)),
        ]
        for format_, families in report.screenings.items()
        for family, found in families.items()
    ]
    text = "Tried once without speculation, before anything was measured; tasks are the first of "
    text += "those kept.\n\n"
    return text + markdown_table(["", "tried", "loop", "not the work", "kept"], rows)


def _goals(report: SpeculationReport) -> str:
    rows: list[list[str]] = []
    for group in dict.fromkeys(c.group for c in report.columns if c.engine == "twinfire"):
        columns = [c for c in report.columns if c.group == group and c.method != "off"]
        for key, scenario in scenarios_of(report, group).items():
            found = {c.method: ratio(scenario, c) for c in columns}
            known = {method: value for method, value in found.items() if value is not None}
            if not known:
                continue
            family = FAMILIES[key[0]]
            goal = family.goal_single if key[1] == 1 else family.goal_eight
            meant = [known[method] for method in family.goal_methods if method in known]
            worst = min(known, key=lambda method: known[method])
            best = f"{max(meant):.2f}" if meant else "-"
            rows.append(
                [
                    f"{group[1]}: {_label(key)}",
                    f"{' or '.join(family.goal_methods)} {goal:.2f}",
                    f"{best} {'met' if meant and max(meant) >= goal else 'missed'}",
                    f"{worst} {known[worst]:.2f} {'met' if known[worst] >= LEAST else 'missed'}",
                ]
            )
    return markdown_table(["", "goal", "best", f"lowest of all, goal {LEAST:.2f}"], rows)
