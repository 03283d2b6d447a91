"""What speculation brings: off and on, one server after the other, each with its own fresh process.

    python benchmarks/speculation.py                       # our bf16 and int8
    python benchmarks/speculation.py --quick --quantization int8 --method suffix
    python benchmarks/speculation.py --vllm DIR/vllm --vllm-model DIR/smollm2-135m-bf16

Agent edits, tool calls and code sessions, whose answers repeat what they were given; open chat; and
what speculation could harm: long prompts with short answers, and text that nothing predicts. Tasks
that the model does without looping are found once with `off` and kept in `--kept`. Every round
starts every server anew and asks it every task once, so a tree of past outputs never knows an
answer. Runs in which other processes took more than `--max-foreign-cpu` of the cores are repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from comparison import ServerUnderTest
from measured_server import TooBusy, check_calm, note, run_and_write, started
from speculation_report import Column, SpeculationReport, markdown
from speculation_run import (
    ScenarioRun,
    Screening,
    checksum_of,
    run_tasks,
    screen,
)
from speculation_tasks import FAMILIES, Task
from twinfire.bench.load_run import RunOptions, server_version, warm_up
from twinfire.bench.machine import describe_machine

FOLDER = Path(__file__).parent
KEPT = FOLDER / "data" / "speculation-kept.json"
PORT = 8140
STREAMS = 8
METHODS = ("suffix", "hybrid", "ngram", "eagle3")
QUANTIZATION = {"bf16": "none", "int8": "int8"}
VLLM_METHODS = {
    "off": None,
    "ngram": {
        "method": "ngram",
        "num_speculative_tokens": 8,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 5,
    },
    "suffix": {"method": "suffix"},
}
SIZES = {
    "agent edit": (3, 8),
    "free edit": (6, 8),
    "tool-call JSON": (6, 16),
    "code session": (2, 8),
    "chat": (6, 8),
    "chat T=0.8": (6, 8),
    "long prompt": (4, 0),
    "random text": (3, 8),
}
QUICK_SIZES = {
    "agent edit": (2, 8),
    "free edit": (4, 0),
    "tool-call JSON": (4, 8),
    "code session": (1, 8),
    "chat": (5, 0),
    "chat T=0.8": (5, 0),
    "long prompt": (3, 0),
    "random text": (2, 0),
}
"""Tasks of a single stream and of eight; no task is in both."""


@dataclass(frozen=True, slots=True)
class Part:
    """Tasks of one family at one number of streams."""

    family: str
    streams: int
    tasks: Sequence[Task]


@dataclass(frozen=True, slots=True)
class Options:
    columns: list[Column]
    families: tuple[str, ...]
    sizes: dict[str, tuple[int, int]]
    rounds: int
    peer_rounds: int
    retries: int
    max_foreign_cpu: float
    start_timeout_s: float
    kept: Path
    out: Path


def main() -> int:
    options = parse_options()
    return run_and_write("speculation", measure(options), markdown, options.out)


async def measure(options: Options) -> SpeculationReport:
    started_at, load_before = now(), os.getloadavg()[0]
    await check_calm(options.max_foreign_cpu)
    candidates = {family: FAMILIES[family].make() for family in options.families}
    screenings = await screen_all(options, candidates)
    runs: list[ScenarioRun] = []
    versions: dict[str, str] = {}
    thrown_away = 0
    for index in range(max(options.rounds, options.peer_rounds)):
        for column in options.columns:
            if index >= (options.rounds if column.engine == "twinfire" else options.peer_rounds):
                continue
            parts = parts_of(options, column, candidates, screenings[column.format])
            for attempt in range(options.retries + 1):
                note(f"round {index + 1}: {column.name}, {len(parts)} scenarios")
                measured = await run_parts(options, column, index, parts, versions)
                good = [one for one in measured if one.foreign_cpu <= options.max_foreign_cpu]
                runs += good
                done = {(one.family, one.streams) for one in good}
                parts = [part for part in parts if (part.family, part.streams) not in done]
                if not parts:
                    break
                thrown_away += len(parts)
                worst = max(one.foreign_cpu for one in measured)
                note(f"  {len(parts)} thrown away: others took up to {worst:.1%} of the cores")
                if attempt == options.retries:
                    raise TooBusy(f"{thrown_away} runs were disturbed (--max-foreign-cpu)")
    return SpeculationReport(
        started_at=started_at,
        ended_at=now(),
        command=shown(shlex.join(["python", "benchmarks/speculation.py", *sys.argv[1:]])),
        machine=describe_machine(),
        load_average_before=load_before,
        max_foreign_cpu=options.max_foreign_cpu,
        runs_thrown_away=thrown_away,
        columns=[
            msgspec.structs.replace(column, command=shown(column.command))
            for column in options.columns
        ],
        versions=versions,
        screenings=screenings,
        runs=runs,
    )


async def screen_all(
    options: Options, candidates: dict[str, list[Task]]
) -> dict[str, dict[str, Screening]]:
    """Return which tasks are used, by format; what was found before is taken from the file."""
    known: dict[str, dict[str, Screening]] = {}
    if options.kept.exists():
        known = msgspec.json.decode(options.kept.read_bytes(), type=dict[str, dict[str, Screening]])
    wanted = {family: sum(options.sizes[family]) for family in options.families}
    for column in options.columns:
        if column.engine != "twinfire" or column.method != "off":
            continue
        found = known.setdefault(column.format, {})
        missing = [
            family
            for family in options.families
            if family not in found
            or found[family].checksum != checksum_of(candidates[family])
            or (
                len(found[family].kept) < wanted[family]
                and found[family].tried < len(candidates[family])
            )
        ]
        if missing:
            async with started(server_of(column), options.start_timeout_s) as (_, client):
                for family in missing:
                    note(f"looking for tasks: {column.format} {family}")
                    found[family] = await screen(
                        client, FAMILIES[family], candidates[family], wanted[family]
                    )
                    options.kept.parent.mkdir(parents=True, exist_ok=True)
                    content = msgspec.json.format(msgspec.json.encode(known), indent=1)
                    options.kept.write_bytes(content + b"\n")
    return {
        format_: {family: found[family] for family in options.families}
        for format_, found in known.items()
        if any(column.format == format_ for column in options.columns)
    }


def parts_of(
    options: Options,
    column: Column,
    candidates: dict[str, list[Task]],
    screenings: dict[str, Screening],
) -> list[Part]:
    parts: list[Part] = []
    for family in options.families:
        if family not in column.families:
            continue
        kept = [candidates[family][number] for number in screenings[family].kept]
        single, many = options.sizes[family]
        if kept[:single]:
            parts.append(Part(family, 1, kept[:single]))
        if kept[single : single + many]:
            parts.append(Part(family, STREAMS, kept[single : single + many]))
    return parts


async def run_parts(
    options: Options,
    column: Column,
    index: int,
    parts: Sequence[Part],
    versions: dict[str, str],
) -> list[ScenarioRun]:
    """Run the parts in one life of the column's server."""
    async with started(server_of(column), options.start_timeout_s) as (_, client):
        versions[column.engine] = await server_version(client) or "version unknown"
        await warm_up(client, RunOptions(seed=index, warmup_requests=2))
        return [
            await run_tasks(
                client, column.name, index, FAMILIES[part.family], part.streams, part.tasks
            )
            for part in parts
        ]


def server_of(column: Column) -> ServerUnderTest:
    return ServerUnderTest(name=column.name, command=column.command, model=column.model)


def our_columns(args: argparse.Namespace) -> list[Column]:
    columns = []
    for format_ in args.quantization or list(QUANTIZATION):
        for method in ("off", *(args.method or METHODS)):
            speculate = method
            if args.head is not None and method in ("eagle3", "hybrid"):
                speculate = f"{method}:head={args.head}"
            words = [args.twinfire, "serve", *([args.model] if args.model else [])]
            words += ["--port", str(PORT), "--quantization", QUANTIZATION[format_]]
            words += ["--speculate", speculate, "--kv-cache-memory", "2GiB"]
            words += ["--log-level", "warning"]
            is_chat_only = args.quick and method == "eagle3"
            families = ("chat", "chat T=0.8") if is_chat_only else tuple(FAMILIES)
            columns.append(
                Column("twinfire", format_, method, shlex.join(words), families=families)
            )
    return columns


def vllm_columns(args: argparse.Namespace) -> list[Column]:
    columns = []
    variables = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": str(args.vllm / "lib" / "libiomp5.so"),
    }
    if args.arctic is not None:
        variables["PYTHONPATH"] = str(args.arctic)
    models = {"bf16": args.vllm_model, "int8": args.vllm_int8_model}
    for format_, model in models.items():
        if model is None:
            continue
        for method in ("off", *(args.vllm_method or ["ngram", "suffix"])):
            words = ["env", *(f"{name}={value}" for name, value in variables.items())]
            words += [str(args.vllm / "bin" / "vllm"), "serve", str(model)]
            words += ["--served-model-name", "m", "--host", "127.0.0.1", "--port", str(PORT)]
            words += ["--max-model-len", "8192"]
            words += ["--dtype", "bfloat16"] if format_ == "bf16" else []
            if (config := VLLM_METHODS[method]) is not None:
                words += ["--speculative-config", json.dumps(config)]
            columns.append(Column("vLLM", format_, method, shlex.join(words), "m"))
    return columns


def shown(command: str) -> str:
    """Return a command without the folders of this machine."""
    return re.sub(r"(?<!\w)/(?:[\w.+-]+/)+", "", command)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def parse_options() -> Options:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("--twinfire", default=str(Path(sys.executable).with_name("twinfire")))
    parser.add_argument("--model", help="our model; else the default one")
    parser.add_argument("--quantization", action="append", choices=list(QUANTIZATION))
    parser.add_argument("--method", action="append", choices=METHODS)
    parser.add_argument("--head", type=Path, help="draft head; else the shipped one")
    parser.add_argument("--vllm", type=Path, help="folder of its environment")
    parser.add_argument("--vllm-model", type=Path, help="folder of the bf16 model")
    parser.add_argument("--vllm-int8-model", type=Path)
    parser.add_argument("--vllm-method", action="append", choices=["ngram", "suffix"])
    parser.add_argument("--arctic", type=Path, help="folder with arctic-inference, for suffix")
    parser.add_argument("--scenario", action="append", choices=list(FAMILIES))
    parser.add_argument("--quick", action="store_true", help="fewer tasks; eagle3 chats only")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-rounds", type=int, help="rounds of vLLM (default: --rounds)")
    parser.add_argument("--most-tasks", type=int, help="of each scenario, to try the script")
    parser.add_argument("--retries", type=int, default=3, help="of disturbed runs (default: 3)")
    parser.add_argument("--max-foreign-cpu", type=float, default=0.03, metavar="SHARE")
    parser.add_argument("--start-timeout", type=float, default=900.0, metavar="SECONDS")
    parser.add_argument("--kept", type=Path, default=KEPT, help="file of the tasks that are used")
    parser.add_argument("--out", type=Path, default=FOLDER / "results" / "speculation")
    args = parser.parse_args()
    if (args.vllm is None) != (args.vllm_model is None and args.vllm_int8_model is None):
        parser.error("--vllm and --vllm-model or --vllm-int8-model go together")
    if args.rounds < 1:
        parser.error(f"--rounds is {args.rounds}; it must be at least 1")
    sizes = QUICK_SIZES if args.quick else SIZES
    if (most := args.most_tasks) is not None:
        sizes = {name: (min(one, most), min(many, most)) for name, (one, many) in sizes.items()}
    columns = our_columns(args) + (vllm_columns(args) if args.vllm is not None else [])
    # Screened with our weights of the same format: a peer alone has nothing to go by.
    formats = {column.format for column in columns if column.engine == "twinfire"}
    if any(column.format not in formats for column in columns):
        parser.error("vLLM's formats must be among --quantization")
    return Options(
        columns=sorted(columns, key=lambda column: list(QUANTIZATION).index(column.format)),
        families=tuple(args.scenario or FAMILIES),
        sizes=sizes,
        rounds=args.rounds,
        peer_rounds=args.rounds if args.peer_rounds is None else args.peer_rounds,
        retries=args.retries,
        max_foreign_cpu=args.max_foreign_cpu,
        start_timeout_s=args.start_timeout,
        kept=args.kept,
        out=args.out,
    )


if __name__ == "__main__":
    sys.exit(main())
