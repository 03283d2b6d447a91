"""Loading a large checkpoint beside a plain sequential read of the same bytes, page cache cold.

Writes random weights of Llama 3.2 1B's shape (bf16, in shards), then alternates: drop the files
from the page cache and read them from first to last byte; drop them again and load them into the
native runner in a process of its own; with packed weights kept on disk, load those. Beside it, how
fast the disk is when read past the page cache, several pieces at a time. Removes what it wrote.

A virtual machine may give its free memory back to its host, and getting it again can take longer
than reading a disk. With --memory-at-hand as much memory as is loaded is touched and freed before
every one of these, plain reads included; "first touch" says what it took without.

    python benchmarks/load_speed.py FOLDER [--repeats 3] [--quantization none] [--json FILE]
                                           [--checkpoint FOLDER] [--memory-at-hand]
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import msgspec
import numpy as np

from random_checkpoint import LLAMA_1B, write_checkpoint
from twinfire.artifacts.checkpoint import open_checkpoint
from twinfire.artifacts.content_key import content_key
from twinfire.artifacts.file_reader import FileReader, window_bytes
from twinfire.artifacts.mapped_file import MappedFile
from twinfire.bench.machine import describe_machine
from twinfire.engine.cpus import usable_cores
from twinfire.engine.native_runner import load_native_runner
from twinfire.kernels.cpu._native import allocate_bytes
from twinfire.kernels.cpu.weight_cache import WeightCache
from twinfire.kernels.cpu.weight_loader import READS_AT_ONCE, SLAB_BYTES

PLAIN = "plain read"
FIRST_TOUCH = "first touch of memory, no disk"
READ_BYTES = 8 << 20


def main() -> None:
    args = _parse_args()
    if args.load is not None:
        print(json.dumps(_load(args.load, args.quantization, args.cache)))
        return
    # Below the folder that was named, so that nothing else is ever removed.
    folder = Path(tempfile.mkdtemp(prefix="load-speed-", dir=args.folder))
    try:
        if args.checkpoint is None:
            write_checkpoint(folder, LLAMA_1B)
        result = measure(args.checkpoint or folder, folder / "cache", args)
    finally:
        shutil.rmtree(folder)
    print(_table(result))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


def measure(checkpoint: Path, cache: Path, args: argparse.Namespace) -> dict[str, object]:
    files = sorted(checkpoint.glob("*.safetensors"))
    num_bytes = sum(file.stat().st_size for file in files)
    rows: dict[str, list[float]] = defaultdict(list)
    _load_in_process(checkpoint, args, cache)
    for _ in range(args.repeats):
        rows[FIRST_TOUCH].append(_touch(num_bytes))
        for name, seconds_of in {
            PLAIN: lambda: _read(files),
            "read past the page cache": lambda: _read_direct(files),
            "load": lambda: _load_in_process(checkpoint, args, None),
            "load, packed on disk": lambda: _load_in_process(checkpoint, args, cache),
        }.items():
            _drop([*files, *cache.glob("*")])
            if args.memory_at_hand:
                _touch(num_bytes * 5 // 4)
            rows[name].append(seconds_of())
    return {
        "command": " ".join(["python", "benchmarks/load_speed.py", *sys.argv[1:]]),
        "machine": msgspec.to_builtins(describe_machine()),
        "bytes": num_bytes,
        "quantization": args.quantization,
        "threads": usable_cores(),
        "memory_at_hand": args.memory_at_hand,
        "seconds": rows,
        "median_s": {name: statistics.median(times) for name, times in rows.items()},
        "plain_read_over_this": {
            name: statistics.median(p / t for p, t in zip(rows[PLAIN], times, strict=True))
            for name, times in rows.items()
        },
    }


def _touch(num_bytes: int) -> float:
    """Have as much memory as that for a moment; return the seconds it took to get it."""
    started_s = time.perf_counter()
    allocate_bytes(num_bytes)[:: mmap.PAGESIZE] = 1
    return time.perf_counter() - started_s


def _drop(files: list[Path]) -> None:
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _read(files: list[Path]) -> float:
    buffer = bytearray(READ_BYTES)
    started_s = time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass
    return time.perf_counter() - started_s


def _read_direct(files: list[Path]) -> float:
    """Read every piece once into a few pieces of memory, as loading does but for the packing."""
    rooms: SimpleQueue[np.ndarray] = SimpleQueue()
    for _ in range(READS_AT_ONCE):
        rooms.put(allocate_bytes(window_bytes(SLAB_BYTES)))

    def read(reader: FileReader, offset: int, num_bytes: int) -> None:
        room = rooms.get()
        reader.read(offset, num_bytes, room, keep_cached=False)
        rooms.put(room)

    started_s = time.perf_counter()
    with ThreadPoolExecutor(READS_AT_ONCE) as pool:
        for path in files:
            with closing(FileReader(MappedFile(path))) as reader:
                size = path.stat().st_size
                starts = range(0, size, SLAB_BYTES)
                lengths = [min(SLAB_BYTES, size - start) for start in starts]
                list(pool.map(partial(read, reader), starts, lengths))
    return time.perf_counter() - started_s


def _load_in_process(folder: Path, args: argparse.Namespace, cache: Path | None) -> float:
    command = [sys.executable, __file__, "--load", str(folder), "--quantization", args.quantization]
    if cache is not None:
        command += ["--cache", str(cache)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return float(json.loads(done.stdout))


def _load(folder: Path, quantization: str, cache: Path | None) -> float:
    started_s = time.perf_counter()
    checkpoint = open_checkpoint(folder)
    kept = cache and WeightCache(cache, 1 << 50, content_key(checkpoint.weight_files))
    runner = load_native_runner(
        checkpoint.config,
        checkpoint.weights,
        quantization=quantization,
        kv_dtype="bf16",
        num_threads=usable_cores(),
        progress=lambda *_: None,
        cache=kept,
    )
    seconds = time.perf_counter() - started_s
    runner.save_weights(lambda: None)
    return seconds


def _table(result: dict[str, object]) -> str:
    gigabytes = result["bytes"] / 1e9
    lines = [
        f"{gigabytes:.2f} GB, cold{', memory at hand' * result['memory_at_hand']}",
        "|  | s | GB/s | plain read / this, paired median |",
        "|---|---|---|---|",
    ]
    for name, seconds in result["median_s"].items():
        ratio = result["plain_read_over_this"][name]
        lines.append(f"| {name} | {seconds:.2f} | {gigabytes / seconds:.2f} | {ratio:.2f} |")
    return "\n".join(lines)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "folder", nargs="?", type=Path, default=Path("."), help="on the disk to measure"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quantization", default="none", choices=["none", "int8", "int4"])
    parser.add_argument("--checkpoint", type=Path, help="load this one instead of writing one")
    parser.add_argument("--memory-at-hand", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cache", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
