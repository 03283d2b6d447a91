"""What each precision costs in quality, against float32 on the torch reference.

Perplexity and top-1 agreement over a fixed text (Python's own language reference, as `pydoc` has
it), in windows that start empty; and the relative error of one layer with Gaussian weights and
inputs, which no model's training has shaped. The default model's file is itself 4-bit (Q4_1), so
float32 here means that file's values, and 4-bit settings keep them exactly.

    python benchmarks/quality.py [--windows 8] [--window-tokens 512] [--out benchmarks/results/x]
"""

from __future__ import annotations

import argparse
import json
import sys
from hashlib import sha256
from pathlib import Path
from pydoc_data.topics import topics

import msgspec
import numpy as np

from twinfire.artifacts.aliases import DEFAULT_ALIAS
from twinfire.artifacts.checkpoint import Checkpoint, open_checkpoint
from twinfire.artifacts.model_store import resolve_model
from twinfire.bench.machine import describe_machine
from twinfire.cache.kv_group import BLOCK_SIZE
from twinfire.engine.cpus import usable_cores
from twinfire.engine.native_runner import load_native_runner
from twinfire.engine.runner import Runner
from twinfire.engine.torch_runner import load_torch_runner
from twinfire.kernels.cpu import _native
from twinfire.kernels.step_batch import StepBatch

SETTINGS = (
    ("auto", "bf16"),
    ("none", "bf16"),
    ("int8", "bf16"),
    ("int4", "bf16"),
    ("none", "int8"),
    ("int8", "int8"),
)
LAYER_FORMATS = ("bf16", "int8", "q8_0", "q4_0", "q4_1")
LAYER_WIDTH, LAYER_ROWS = 2048, 64


def main() -> None:
    args = _parse_args()
    checkpoint = open_checkpoint(Path(resolve_model(args.model).path))
    text = "\n".join(topics[name] for name in sorted(topics))
    ids = np.array(checkpoint.tokenizer().encode(text), np.int32)
    windows = ids[: args.windows * args.window_tokens].reshape(args.windows, -1)
    reference = load_torch_runner(
        checkpoint.config,
        checkpoint.weights,
        dtype="f32",
        num_threads=args.threads,
        progress=lambda *_: None,
    )
    expected = Scores.of(reference, windows)
    del reference
    settings = [{"setting": "f32, torch", "perplexity": expected.perplexity, "top1_agreement": 1.0}]
    for quantization, kv_dtype in SETTINGS:
        runner = _native_runner(checkpoint, quantization, kv_dtype, args.threads)
        scores = Scores.of(runner, windows)
        settings.append(
            {
                "setting": f"{quantization} ({runner.weight_format}), KV {kv_dtype}",
                "perplexity": scores.perplexity,
                "top1_agreement": float(np.mean(scores.best == expected.best)),
            }
        )
    result = {
        "command": " ".join(["python", "benchmarks/quality.py", *sys.argv[1:]]),
        "machine": msgspec.to_builtins(describe_machine()),
        "model": checkpoint.name,
        "kernel_version": _native.kernel_version,
        "isa": _native.isa(),
        "text_sha256": sha256(text.encode()).hexdigest(),
        "tokens": int(windows.size),
        "window_tokens": args.window_tokens,
        "settings": settings,
        "layer_relative_error": {name: layer_error(name) for name in LAYER_FORMATS},
    }
    print(table(result))
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(table(result))


class Scores:
    """What a runner predicts at each position of each window."""

    def __init__(self, best: np.ndarray, nll: np.ndarray) -> None:
        self.best = best
        self.perplexity = float(np.exp(nll.mean()))

    @classmethod
    def of(cls, runner: Runner, windows: np.ndarray) -> Scores:
        """Run every window from an empty cache."""
        runner.init_kv(-(-windows.shape[1] // BLOCK_SIZE))
        parts = [_window_scores(runner, window) for window in windows]
        return cls(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _window_scores(runner: Runner, window: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    count = len(window)
    rows = np.arange(count, dtype=np.int32)
    blocks = np.arange(-(-count // BLOCK_SIZE), dtype=np.int32)
    batch = StepBatch(
        token_ids=window,
        positions=rows,
        slots=rows,
        query_starts=np.array([0, count], np.int32),
        context_lens=np.array([count], np.int32),
        block_tables=blocks[None],
        logit_rows=rows,
        block_copies=np.empty((0, 2), np.int32),
    )
    runner.execute(batch)
    logits = runner.logits(0, count)[:-1]
    top = logits.max(axis=1)
    total = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
    return logits.argmax(axis=1), total - logits[rows[:-1], window[1:]]


def _native_runner(
    checkpoint: Checkpoint, quantization: str, kv_dtype: str, num_threads: int
) -> Runner:
    return load_native_runner(
        checkpoint.config,
        checkpoint.weights,
        quantization=quantization,
        kv_dtype=kv_dtype,
        num_threads=num_threads,
        progress=lambda *_: None,
    )


def layer_error(format_name: str) -> float:
    """Return the root mean square error of x @ w.T over that of the exact result."""
    rng = np.random.default_rng(0)
    weight = rng.normal(0, 0.02, (LAYER_WIDTH, LAYER_WIDTH)).astype(np.float32)
    x = rng.normal(0, 1, (LAYER_ROWS, LAYER_WIDTH)).astype(np.float32)
    shape = (format_name, LAYER_WIDTH, LAYER_WIDTH, False, False)
    panels = _native.allocate_bytes(_native.PackedMatrix.num_bytes_of(*shape))
    matrix = _native.PackedMatrix(*shape, panels)
    content = weight.reshape(-1).view(np.uint8)
    _native.pack_panels(matrix, panels, [("f32", content)], None, 0, matrix.num_panels)
    row_bytes = _native.activation_row_bytes(matrix.input_format, LAYER_WIDTH)
    rows = np.zeros((LAYER_ROWS, row_bytes), np.uint8)
    _native.write_activation_rows(x, matrix.input_format, rows)
    out = np.zeros((LAYER_ROWS, 4 * LAYER_WIDTH), np.uint8)
    _native.gemm(matrix, rows, "store_f32", out)
    exact = x.astype(np.float64) @ weight.T.astype(np.float64)
    error = out.view(np.float32) - exact
    return float(np.sqrt(np.mean(error**2) / np.mean(exact**2)))


def table(result: dict[str, object]) -> str:
    """Return the result as markdown."""
    lines = [
        f"{result['model']}, {result['tokens']:,} tokens in windows of {result['window_tokens']}, "
        f"kernels {result['isa']}. The model's file is 4-bit (Q4_1) where its name says so: f32 "
        "means its values, and `auto` keeps them.",
        "",
        f"    {result['command']}",
        "",
        "| setting | perplexity | top-1 agreement with f32 |",
        "|---|---|---|",
    ]
    for row in result["settings"]:
        agreement = f"{row['top1_agreement']:.2%}"
        lines.append(f"| {row['setting']} | {row['perplexity']:.3f} | {agreement} |")
    lines += [
        "",
        f"One layer of {LAYER_WIDTH} x {LAYER_WIDTH} Gaussian weights on Gaussian inputs:",
        "",
        "| format | relative error |",
        "|---|---|",
    ]
    for name, error in result["layer_relative_error"].items():
        lines.append(f"| {name} | {error:.4f} |")
    return "\n".join(lines) + "\n"


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=DEFAULT_ALIAS)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--window-tokens", type=int, default=512)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--out", type=Path, help="writes FILE.json and FILE.md")
    return parser.parse_args()


if __name__ == "__main__":
    main()
