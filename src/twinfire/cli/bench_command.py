"""`twinfire bench`: measure any OpenAI-compatible server under load, or any server's start.

Owns the options and the progress shown; everything measured is in the bench room, which is
imported only when a command runs, so that other commands start fast.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from twinfire.bench.parameters import Scenario
from twinfire.bench.target import Target
from twinfire.cli.bench_options import add_load_options, load_scenarios, load_target
from twinfire.protocol.errors import TwinfireError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from twinfire.bench.load_report import LoadReport
    from twinfire.bench.load_run import RunOptions
    from twinfire.bench.startup import StartupReport, StartupRun

FAILED_STATUS = 1


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `bench` with its own sub-commands."""
    parser = subparsers.add_parser("bench", help="measure a server under load, or its start")
    commands = parser.add_subparsers(metavar="WHAT", required=True)
    load = commands.add_parser(
        "load",
        help="send load to any OpenAI-compatible server",
        description="Send load to any OpenAI-compatible server and report latencies and rates. "
        "Without a scenario: single, then concurrent.",
    )
    add_load_options(load)
    load.set_defaults(run=run_load)
    startup = commands.add_parser(
        "startup",
        help="time a server from process start to its first token",
        description="Start a server several times and report the medians of: port open, /health "
        "200, first token, peak memory of its processes. Give the command after --.",
    )
    _add_startup_options(startup)
    startup.set_defaults(run=run_startup)


def run_load(args: argparse.Namespace) -> int:
    """Run the chosen scenarios; 1 when any request failed."""
    from rich.console import Console

    from twinfire.bench.load_metrics import Objectives
    from twinfire.bench.load_run import RunOptions, new_seed
    from twinfire.bench.report_plot import check_plotting

    if args.plot is not None:
        check_plotting()
    target = load_target(args)
    objectives = Objectives(args.slo_ttft_ms, args.slo_itl_ms, args.slo_e2e_ms)
    options = RunOptions(
        seed=new_seed() if args.seed is None else args.seed,
        objectives=objectives,
        warmup_requests=args.warmup,
        max_model_len=args.max_model_len,
        text=args.text,
    )
    console = Console()
    scenarios = load_scenarios(args)
    reports = [_run_one(console, target, scenario, options) for scenario in scenarios]
    for report in reports:
        _write(console, report, args, several=len(reports) > 1)
    complete = all(p.metrics.completed == p.metrics.requests for r in reports for p in r.phases)
    return 0 if complete else FAILED_STATUS


def _run_one(
    console: Console, target: Target, scenario: Scenario, options: RunOptions
) -> LoadReport:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from twinfire.bench.load_run import run_scenario
    from twinfire.bench.report_table import print_report
    from twinfire.bench.request_record import RequestRecord

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    # Few redraws: the client must not take CPU from a server on the same machine.
    with Progress(*columns, console=console, transient=True, refresh_per_second=2) as progress:
        task = progress.add_task(scenario.name, total=None)

        def on_stage(stage: str, total: int) -> None:
            progress.reset(task, description=f"{scenario.name}: {stage}", total=total or None)

        def on_record(record: RequestRecord) -> None:
            progress.advance(task)

        report = asyncio.run(run_scenario(target, scenario, options, on_stage, on_record))
    print_report(console, report)
    console.print()
    return report


def _write(console: Console, report: LoadReport, args: argparse.Namespace, several: bool) -> None:
    from twinfire.bench.load_report import write_json
    from twinfire.bench.report_plot import write_plot

    if args.json is not None:
        path = _numbered(args.json, report.scenario, several)
        write_json(report, path)
        console.print(f"wrote {path}", style="dim")
    if args.plot is not None:
        path = _numbered(args.plot, report.scenario, several)
        write_plot(report, path)
        console.print(f"wrote {path}", style="dim")


def _numbered(path: Path, scenario: str, several: bool) -> Path:
    return path.with_stem(f"{path.stem}-{scenario}") if several else path


def _add_startup_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("command", nargs="+", metavar="CMD", help="the server's command line")
    parser.add_argument("--url", help="where it will listen (default: by --host and --port of CMD)")
    parser.add_argument("--model", help="model id (default: the first of /v1/models)")
    parser.add_argument("--api", choices=("chat", "completions"), default="chat")
    parser.add_argument("--runs", type=int, default=3, help="starts (default: 3)")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")


def run_startup(args: argparse.Namespace) -> int:
    """Measure a server's start and print the medians."""
    import msgspec
    from rich.console import Console

    from twinfire.bench.server_process import run_until_signal, url_of_command
    from twinfire.bench.startup import measure_startup

    if args.runs < 1:
        raise TwinfireError(f"--runs {args.runs}: at least 1")
    console = Console()
    command = shlex.split(args.command[0]) if len(args.command) == 1 else args.command
    target = Target(url=args.url or url_of_command(command), model=args.model, api=args.api)

    def on_run(run: StartupRun) -> None:
        console.print(f"first token after {run.first_token_s:.2f} s", style="dim")

    report = run_until_signal(
        measure_startup(command, target, runs=args.runs, timeout_s=args.timeout, on_run=on_run)
    )
    _print_startup(console, report)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    return 0


def _print_startup(console: Console, report: StartupReport) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold cyan")
    for column in ("", "port s", "ready s", "first token s", "peak RSS MB", "PSS MB", "stop s"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    named = [(f"run {index}", run) for index, run in enumerate(report.runs, 1)]
    for name, run in [*named, ("median", report.median)]:
        table.add_row(
            name,
            f"{run.port_s:.2f}",
            f"{run.ready_s:.2f}",
            f"{run.first_token_s:.2f}",
            f"{run.peak_rss_bytes / 1e6:.0f}",
            "-" if run.pss_bytes is None else f"{run.pss_bytes / 1e6:.0f}",
            f"{run.stop_s:.2f}",
        )
    console.print(table)
    if report.median.stages:
        console.print(_stage_table(named, report.median))


def _stage_table(named: list[tuple[str, StartupRun]], median: StartupRun) -> Table:
    """Milliseconds of each stage: the first start packs weights, later ones find them packed."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold cyan")
    table.add_column("stage, ms", no_wrap=True)
    columns = [*named, ("median", median)]
    for name, _ in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for stage in named[0][1].stages:
        seconds = [run.stages.get(stage) for _, run in columns]
        table.add_row(stage, *("-" if s is None else f"{s * 1e3:.0f}" for s in seconds))
    return table
