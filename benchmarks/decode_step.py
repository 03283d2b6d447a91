"""How far a decode step is from the memory wall: step and memory sweep, alternating in one process.

A step of few sequences has to read all weights and the sequences' keys and values once. The sweep
reads the same weights, and as many bytes as the keys and values have, on the same threads and does
nothing with them; the ratio of the paired medians is what the kernels, the waits between them and
the sharing of work cost. Other memory would not do: what a virtual machine is given can differ by
half in speed from one allocation to the next.

    python benchmarks/decode_step.py [--quantization int8] [--context 512] [--sequences 1]
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import numpy.typing as npt

from twinfire.artifacts.aliases import DEFAULT_ALIAS
from twinfire.artifacts.checkpoint import open_checkpoint
from twinfire.artifacts.model_store import resolve_model
from twinfire.cache.kv_group import BLOCK_SIZE
from twinfire.engine.cpus import usable_cores
from twinfire.engine.native_runner import NativeRunner, load_native_runner
from twinfire.kernels.cpu import _native, weight_loader
from twinfire.kernels.cpu.panel_memory import allocate_panels
from twinfire.kernels.step_batch import StepBatch

PROMPT_CHUNK = 512


def main() -> None:
    args = _parse_args()
    checkpoint = open_checkpoint(Path(resolve_model(args.model).path))
    with _noting_panels() as panels:
        runner = load_native_runner(
            checkpoint.config,
            checkpoint.weights,
            quantization=args.quantization,
            kv_dtype=args.kv_cache_dtype,
            num_threads=args.threads,
            progress=lambda *_: None,
            isa=args.isa,
        )
    blocks = -(-(args.context + 1) // BLOCK_SIZE)
    runner.init_kv(blocks * args.sequences)
    for sequence in range(args.sequences):
        for start in range(0, args.context, PROMPT_CHUNK):
            stop = min(start + PROMPT_CHUNK, args.context)
            runner.execute(_batch([sequence], start, stop, blocks))
    step = _batch(range(args.sequences), args.context, args.context + 1, blocks)
    kv_bytes = runner.kv_layout.bytes_per_block // BLOCK_SIZE * args.context * args.sequences
    like_kv = _native.allocate_bytes(-(-kv_bytes // 256) * 256)
    like_kv[:] = 1
    # All panels are one piece of memory.
    weights = panels[0].base
    swept = (weights[: weights.nbytes // 256 * 256], like_kv)
    team = _native.ThreadTeam(args.threads)
    pairs = [
        (_step_s(runner, step), sum(map(team.measure_read, swept))) for _ in range(args.repeats)
    ]
    _report(args, runner, pairs, sum(part.nbytes for part in swept))
    if args.profile:
        _report_profile([runner.profile(step) for _ in range(args.repeats)])


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_ALIAS)
    parser.add_argument("--quantization", default="auto", choices=["auto", "none", "int8", "int4"])
    parser.add_argument("--kv-cache-dtype", default="bf16", choices=["bf16", "int8"])
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--context", type=int, default=256, help="tokens before the step")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--profile", action="store_true", help="show where the time goes")
    parser.add_argument("--isa", choices=_native.supported_isas(), default=_native.isa())
    return parser.parse_args()


def _batch(sequences: list[int] | range, start: int, stop: int, blocks: int) -> StepBatch:
    """Return tokens [start, stop) of every sequence, the last one's logits wanted."""
    count = stop - start
    positions = np.tile(np.arange(start, stop, dtype=np.int32), len(sequences))
    first_slots = np.repeat(np.array(sequences, np.int32) * blocks * BLOCK_SIZE, count)
    ends = np.arange(1, len(sequences) + 1, dtype=np.int32) * count
    return StepBatch(
        token_ids=(positions * 31 + 7) % 1000,
        positions=positions,
        slots=first_slots + positions,
        query_starts=np.concatenate([np.zeros(1, np.int32), ends]),
        context_lens=np.full(len(sequences), stop, np.int32),
        block_tables=np.array([range(s * blocks, (s + 1) * blocks) for s in sequences], np.int32),
        logit_rows=ends - 1,
        block_copies=np.empty((0, 2), np.int32),
    )


@contextlib.contextmanager
def _noting_panels() -> Iterator[list[npt.NDArray[np.uint8]]]:
    """Note the memory of packed matrices as it is allocated."""
    panels: list[npt.NDArray[np.uint8]] = []

    def allocate(sizes: Sequence[int]) -> list[npt.NDArray[np.uint8]]:
        panels.extend(allocate_panels(sizes))
        return list(panels)

    with mock.patch.object(weight_loader, "allocate_panels", allocate):
        yield panels


def _step_s(runner: NativeRunner, batch: StepBatch) -> float:
    start_s = time.perf_counter()
    runner.execute(batch)
    runner.logits(0, len(batch.logit_rows))
    return time.perf_counter() - start_s


def _report(
    args: argparse.Namespace,
    runner: NativeRunner,
    pairs: list[tuple[float, float]],
    num_bytes: int,
) -> None:
    steps, sweeps = (np.array(column) for column in zip(*pairs, strict=True))
    print(
        f"{runner.weight_format}, {args.sequences} x {args.context} tokens of context, "
        f"{args.threads} threads, {args.isa}, {num_bytes / 1e6:.1f} MB, "
        f"median of {args.repeats} pairs"
    )
    print(f"step   {np.median(steps) * 1e3:8.3f} ms   least {steps.min() * 1e3:8.3f} ms")
    print(
        f"sweep  {np.median(sweeps) * 1e3:8.3f} ms   least {sweeps.min() * 1e3:8.3f} ms   "
        f"{num_bytes / np.median(sweeps) / 1e9:.1f} GB/s"
    )
    ratio = statistics.median(steps / sweeps)
    print(
        f"step / sweep, paired median {ratio:.3f}, least by least {steps.min() / sweeps.min():.3f}"
    )


def _report_profile(profiles: list[list[tuple[str, float]]]) -> None:
    totals: dict[str, list[float]] = {}
    for phases in profiles:
        step: dict[str, float] = defaultdict(float)
        for label, seconds in phases:
            step[label] += seconds
        for label, seconds in step.items():
            totals.setdefault(label, []).append(seconds)
    print("phase by phase, the head's matrix left out:")
    for label, seconds in totals.items():
        print(
            f"  {label:20} {statistics.median(seconds) * 1e6:9.1f} us   "
            f"least {min(seconds) * 1e6:9.1f} us"
        )


if __name__ == "__main__":
    main()
