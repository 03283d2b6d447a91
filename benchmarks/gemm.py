"""Products of the native backend beside oneDNN's through torch and a sweep over as many bytes.

All of them take turns in one process, so that a noisy machine hits them alike; a cell is the median
of its turns. Matrices are copied until they no longer fit in the last cache, as a model's weights
do not. With one thread the clock is the thread's own CPU time, which others on the machine do not
lengthen.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from twinfire.kernels.cpu import _native
from twinfire.kernels.torch.linear import OneDnnLinear

FORMATS = ("bf16", "int8", "q8_0", "q4_0", "q4_1")
ROWS = (1, 2, 4, 8, 16, 32, 64, 512)


@dataclass(frozen=True)
class Shape:
    """A matrix [n, k]."""

    n: int
    k: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        n, k = text.split("x")
        return cls(int(n), int(k))


class NativeProduct:
    """One format, over its copies of a matrix in turn."""

    def __init__(
        self, format_name: str, shape: Shape, copies: int, team: _native.ThreadTeam | None
    ) -> None:
        random = np.random.default_rng(0)
        values = random.normal(0, 0.05, (shape.n, shape.k)).astype(np.float32)
        parts = [("f32", values.reshape(-1).view(np.uint8))]
        self.num_bytes = _native.PackedMatrix.num_bytes_of(format_name, shape.n, shape.k)
        self._matrices = []
        # One piece of memory, as for a model: huge pages need more than a small matrix.
        memory = _native.allocate_bytes(copies * self.num_bytes).reshape(copies, -1)
        for copy, panels in enumerate(memory):
            matrix = _native.PackedMatrix(format_name, shape.n, shape.k, False, False, panels)
            if copy:
                panels[:] = memory[0]
            else:
                _native.pack_panels(matrix, panels, parts, None, 0, matrix.num_panels)
            self._matrices.append(matrix)
        self._shape = shape
        self._team = team

    def prepare(self, num_rows: int) -> Callable[[], None]:
        """Return a call that multiplies by every copy once."""
        x = np.random.default_rng(1).normal(0, 1, (num_rows, self._shape.k)).astype(np.float32)
        row_format = self._matrices[0].input_format
        row_bytes = _native.activation_row_bytes(row_format, self._shape.k)
        rows = _native.allocate_bytes(num_rows * row_bytes).reshape(num_rows, row_bytes)
        _native.write_activation_rows(x, row_format, rows)
        out = _native.allocate_bytes(2 * num_rows * self._shape.n).reshape(num_rows, -1)

        def run() -> None:
            for matrix in self._matrices:
                _native.gemm(matrix, rows, "store_bf16", out, self._team)

        return run


class OneDnnProduct:
    """bf16 in oneDNN's own layout."""

    def __init__(self, shape: Shape, copies: int) -> None:
        self._linears = [
            OneDnnLinear(torch.randn(shape.n, shape.k).bfloat16(), None) for _ in range(copies)
        ]
        self._shape = shape

    def prepare(self, num_rows: int) -> Callable[[], None]:
        """Return a call that multiplies by every copy once."""
        x = torch.randn(num_rows, self._shape.k).bfloat16()

        def run() -> None:
            for linear in self._linears:
                linear(x)

        return run


def sweep(num_bytes: int) -> Callable[[], None]:
    """Return a call that reads as many bytes."""
    memory = torch.from_numpy(_native.allocate_bytes(num_bytes // 4 * 4)).view(torch.float32)
    memory.fill_(1.0)

    def run() -> None:
        torch.max(memory)

    return run


def medians(
    calls: dict[str, Callable[[], None]], turns: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Return seconds per call, the calls taking turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns + 1):
        for name, call in calls.items():
            start = clock()
            call()
            if turn:
                times[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--shape", type=Shape.parse, default=Shape(3072, 576), help="NxK")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--mebibytes", type=int, default=96, help="of all copies of the bf16 form")
    parser.add_argument("--turns", type=int, default=7)
    args = parser.parse_args()
    shape: Shape = args.shape
    torch.set_num_threads(args.threads)
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    team = _native.ThreadTeam(args.threads) if args.threads > 1 else None
    copies = max(1, (args.mebibytes << 20) // (2 * shape.n * shape.k))
    onednn = OneDnnProduct(shape, copies)
    native = {name: NativeProduct(name, shape, copies, team) for name in args.formats}
    table = Table(title=f"{shape.n}x{shape.k}, {copies} copies, threads: {args.threads}")
    for heading in ("format", "rows", "GFLOP/s", "GB/s", "x oneDNN bf16", "x sweep of its bytes"):
        table.add_column(heading, justify="right")
    for num_rows in args.rows:
        calls = {"oneDNN bf16": onednn.prepare(num_rows)}
        for name, product in native.items():
            calls[name] = product.prepare(num_rows)
            calls[f"sweep {name}"] = sweep(copies * product.num_bytes)
        seconds = medians(calls, args.turns, clock)
        flops = 2 * num_rows * shape.n * shape.k * copies
        base = seconds["oneDNN bf16"]
        plain_bytes = 2 * copies * shape.n * shape.k
        table.add_row(
            "oneDNN", f"{num_rows}", f"{flops / base / 1e9:.0f}", f"{plain_bytes / base / 1e9:.1f}"
        )
        for name, product in native.items():
            own = seconds[name]
            table.add_row(
                name,
                f"{num_rows}",
                f"{flops / own / 1e9:.0f}",
                f"{copies * product.num_bytes / own / 1e9:.1f}",
                f"{base / own:.2f}",
                f"{seconds[f'sweep {name}'] / own:.2f}",
            )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
