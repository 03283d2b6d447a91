"""Compare servers on this machine: A B A B ..., fresh processes, equal prompts, medians and ratios.

    compare_peers.py --server 'twinfire=twinfire serve --port 8100' \
                     --server 'peer=other-server --port 8102' --scenario single
    compare_peers.py --config peers.toml

Give the project first: a ratio is each other server's median over the first's. The TOML file holds
`[[server]]` tables (name, command, and optionally url, model, version_command, extra_body) and
`[scenario.NAME]` tables that change parameters. All prompts are made once, in the first server's
tokens, and sent to every server alike. A run during which other processes took more than
`--max-foreign-cpu` of the cores is thrown away and repeated.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import subprocess
import sys
import time
import tomllib
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from comparison import Comparison, Run, ServerUnderTest, markdown
from measured_server import TooBusy, check_calm, cpu_s, note, run_and_write, started
from twinfire.bench.load_run import RunOptions, build_workload, new_seed, run_built, warm_up
from twinfire.bench.machine import ForeignCpu, describe_machine
from twinfire.bench.parameters import (
    Agent,
    Concurrent,
    InterferenceStreams,
    Parameter,
    Prefix,
    RateSweep,
    Scenario,
    with_parameters,
)
from twinfire.bench.scenarios import Built
from twinfire.bench.startup import PeakMemory
from twinfire.cli.bench_options import LONG, SINGLE

RESULTS = Path(__file__).parent / "results"
SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        *(SINGLE, Concurrent(num_requests=16), LONG, InterferenceStreams()),
        *(Agent(), Prefix(), RateSweep()),
    )
}


class Config(msgspec.Struct, forbid_unknown_fields=True):
    """The TOML file."""

    server: list[ServerUnderTest] = []
    scenario: dict[str, dict[str, Parameter]] = {}


@dataclasses.dataclass(frozen=True)
class Options:
    servers: list[ServerUnderTest]
    scenarios: list[Scenario]
    runs: int
    retries: int
    max_foreign_cpu: float
    start_timeout_s: float
    seed: int
    text: Path | None
    out: Path


def main() -> int:
    options = parse_options()
    return run_and_write("compare_peers", compare(options), markdown, options.out)


async def compare(options: Options) -> Comparison:
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    load_before = os.getloadavg()[0]
    await check_calm(options.max_foreign_cpu)
    built = await build_all(options)
    runs: list[Run] = []
    discarded = 0
    for index in range(options.runs):
        for server in options.servers:
            for attempt in range(options.retries + 1):
                note(f"run {index + 1} of {options.runs}: {server.name}")
                measured = await run_server(options, server, index, built[index])
                worst = max(run.foreign_cpu for run in measured)
                if worst <= options.max_foreign_cpu:
                    break
                note(f"  thrown away: other processes took {worst:.1%} of the cores")
                discarded += 1
                if attempt == options.retries:
                    raise TooBusy(
                        f"{discarded} runs were disturbed; the last by {worst:.1%} of the cores, "
                        f"the limit is {options.max_foreign_cpu:.1%} (--max-foreign-cpu)"
                    )
            runs += measured
    return Comparison(
        started_at=started_at,
        ended_at=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(sys.argv),
        machine=describe_machine(),
        load_average_before=load_before,
        seed=options.seed,
        max_foreign_cpu=options.max_foreign_cpu,
        runs_thrown_away=discarded,
        servers=options.servers,
        runs=runs,
    )


async def build_all(options: Options) -> list[dict[str, Built]]:
    """Make the prompts of every run in one throw-away process of the first server."""
    note(f"making prompts with {options.servers[0].name}")
    built: list[dict[str, Built]] = []
    async with started(options.servers[0], options.start_timeout_s) as (_, client):
        for index in range(options.runs):
            run_options = options_of_run(options, index)
            scenarios = options.scenarios
            built.append({s.name: await build_workload(client, s, run_options) for s in scenarios})
    return built


async def run_server(
    options: Options, server: ServerUnderTest, index: int, built: dict[str, Built]
) -> list[Run]:
    runs: list[Run] = []
    run_options = options_of_run(options, index)
    async with (
        started(server, options.start_timeout_s) as (process, client),
        PeakMemory(process.pid) as memory,
    ):
        ready_s = time.monotonic() - process.started_s
        await warm_up(client, run_options)
        for scenario in options.scenarios:
            foreign, load_average = ForeignCpu(), os.getloadavg()[0]
            cpu_before_s, clock_s = cpu_s(process.pid), time.monotonic()
            report = await run_built(
                client, scenario, built[scenario.name], run_options, lambda record: None
            )
            elapsed_s = time.monotonic() - clock_s
            runs.append(
                Run(
                    server=server.name,
                    index=index,
                    scenario=scenario.name,
                    parameters=report.parameters,
                    foreign_cpu=foreign.share(),
                    load_average_1m=load_average,
                    server_cores_used=(cpu_s(process.pid) - cpu_before_s) / elapsed_s,
                    ready_s=ready_s,
                    peak_rss_bytes=memory.peak_bytes,
                    model=report.model,
                    server_version=report.server_version,
                    notes=report.notes,
                    phases={phase.name: phase.metrics for phase in report.phases},
                )
            )
    return runs


def options_of_run(options: Options, index: int) -> RunOptions:
    return RunOptions(seed=options.seed + index, warmup_requests=2, text=options.text)


def parse_options() -> Options:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("--config", type=Path, help="TOML file with servers and scenarios")
    parser.add_argument("--server", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--scenario", action="append", choices=sorted(SCENARIOS))
    parser.add_argument("--runs", type=int, default=3, help="runs of each server (default: 3)")
    parser.add_argument("--retries", type=int, default=3, help="of a disturbed run (default: 3)")
    parser.add_argument("--max-foreign-cpu", type=float, default=0.03, metavar="SHARE")
    parser.add_argument("--start-timeout", type=float, default=600.0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, help="repeat an earlier comparison's prompts")
    parser.add_argument("--text", type=Path, help="file or folder to take prompt text from")
    parser.add_argument("--out", type=Path, help="result without suffix; else by date in results/")
    args = parser.parse_args()
    config = read_config(parser, args.config)
    servers = [*config.server, *(named_server(parser, text) for text in args.server)]
    if len(servers) < 2:
        parser.error("give at least two servers, by --server or --config")
    names = args.scenario or list(config.scenario) or ["single", "concurrent"]
    return Options(
        servers=[msgspec.structs.replace(server, version=version_of(server)) for server in servers],
        scenarios=[changed(parser, name, config.scenario.get(name, {})) for name in names],
        runs=args.runs,
        retries=args.retries,
        max_foreign_cpu=args.max_foreign_cpu,
        start_timeout_s=args.start_timeout,
        seed=new_seed() if args.seed is None else args.seed,
        text=args.text,
        out=args.out or RESULTS / f"compare-{datetime.now(UTC):%Y-%m-%dT%H%M}",
    )


def read_config(parser: argparse.ArgumentParser, path: Path | None) -> Config:
    if path is None:
        return Config()
    try:
        return msgspec.convert(tomllib.loads(path.read_text()), Config)
    except (OSError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        parser.error(f"--config {path}: {error}")


def changed(parser: argparse.ArgumentParser, name: str, changes: dict[str, Parameter]) -> Scenario:
    if name not in SCENARIOS:
        parser.error(f"[scenario.{name}]: there are {', '.join(SCENARIOS)}")
    known = {field.name for field in dataclasses.fields(SCENARIOS[name])} - {"name"}
    if unknown := set(changes) - known:
        parser.error(f"[scenario.{name}] has no {', '.join(unknown)}; only {', '.join(known)}")
    return with_parameters(SCENARIOS[name], changes)


def named_server(parser: argparse.ArgumentParser, text: str) -> ServerUnderTest:
    name, equals, command = text.partition("=")
    if not equals or not command:
        parser.error(f"--server {text}: NAME=COMMAND")
    return ServerUnderTest(name=name, command=command)


def version_of(server: ServerUnderTest) -> str | None:
    if server.version_command is None:
        return None
    words = shlex.split(server.version_command)
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    lines = (done.stdout or done.stderr).strip().splitlines()
    return lines[-1] if lines else None


if __name__ == "__main__":
    sys.exit(main())
