"""What holding an output to a grammar costs a worker: per grammar, and per token and choice.

The default model's tokenizer, and outputs that it would write token by token. Filling a row says
which tokens may come next, masking puts that on a row of logits, accepting notes the drawn token;
a step does all three for each choice with a grammar. The first output of a grammar builds what
later ones share. Beside them: loading the vocabulary and compiling, which happen on threads.
Times are CPU times, so that other processes do not show.

    python benchmarks/grammar_cost.py [--out benchmarks/results/grammar-cost.md]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from twinfire.artifacts.aliases import DEFAULT_ALIAS
from twinfire.artifacts.checkpoint import open_checkpoint
from twinfire.artifacts.model_store import resolve_model
from twinfire.artifacts.token_grammar import TokenGrammar, grammar_problem
from twinfire.artifacts.tokenizer import Tokenizer
from twinfire.bench.machine import describe_machine
from twinfire.engine.choice_grammar import ChoiceGrammar
from twinfire.kernels.cpu.native_sampling import NativeSamplingOps
from twinfire.kernels.sampling_ops import keep_allowed
from twinfire.protocol.grammar import Grammar

T = TypeVar("T")

REPEATS = 5
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        "address": {
            "anyOf": [
                {"type": "null"},
                {
                    "type": "object",
                    "properties": {"street": {"type": "string"}, "number": {"type": "integer"}},
                },
            ]
        },
    },
    "required": ["name", "age", "email", "tags", "address"],
    "additionalProperties": False,
}
PERSON_TEXT = (
    '{"name": "Ada Lovelace", "age": 36, "email": "ada@example.com", "tags": ["red", "blue"], '
    '"address": {"street": "St James\'s Square in the middle of London", "number": 12}}'
)


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    grammar: Grammar
    output: str


CASES = (
    Case("JSON schema", Grammar("json_schema", json.dumps(PERSON)), PERSON_TEXT),
    Case("any JSON object", Grammar("json_schema", '{"type":"object"}'), PERSON_TEXT),
    Case(
        "regular expression",
        Grammar("regex", "[A-Za-z ,]{20,200}\\."),
        "The quick brown fox jumps over the lazy dog, and nobody minds.",
    ),
    Case("choice", Grammar("lark", 'start: "positive" | "negative" | "neutral"'), "negative"),
)


@dataclass(slots=True)
class Costs:
    """Microseconds of each token."""

    fill: list[float]
    mask: list[float]
    accept: list[float]

    def add(self, other: Costs) -> None:
        self.fill += other.fill
        self.mask += other.mask
        self.accept += other.accept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    checkpoint = open_checkpoint(resolve_model(DEFAULT_ALIAS).path)
    tokenizer, vocab_size = checkpoint.tokenizer(), checkpoint.config.vocab_size
    grammar_problem(CASES[0].grammar)
    tokens, load_s = timed(lambda: TokenGrammar(tokenizer, vocab_size))
    lines = [
        f"Grammars over {vocab_size:,} tokens, {describe_machine().cpu}; CPU time of the thread.",
        "",
        "    python benchmarks/grammar_cost.py",
        "",
        f"Loading the vocabulary, once per worker: {load_s * 1e3:.0f} ms.",
        "",
        "| grammar | compile ms | output | fill µs P50 / P95 / max | mask µs | accept µs | sum |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in CASES:
        lines += rows_of(case, tokens, tokenizer, vocab_size)
    lines += ["", *masking(vocab_size)]
    report = "\n".join(lines) + "\n"
    print(report)
    if args.out:
        args.out.write_text(report)


def rows_of(case: Case, tokens: TokenGrammar, tokenizer: Tokenizer, vocab_size: int) -> list[str]:
    compiled, compile_s = timed(lambda: tokens.compile(case.grammar))
    ids = list(tokenizer.encode(case.output, False))
    logits = np.random.default_rng(0).standard_normal((1, vocab_size)).astype(np.float32)
    runs = []
    for _ in range(1 + REPEATS):
        runs.append(costs_of(ChoiceGrammar(compiled, (2,), ()), ids, logits))
    later = Costs([], [], [])
    for run in runs[1:]:
        later.add(run)
    return [
        f"| {case.name} | {compile_s * 1e3:.1f} | first | {row_of(runs[0])}",
        f"| | | later | {row_of(later)}",
    ]


def costs_of(grammar: ChoiceGrammar, ids: list[int], logits: np.ndarray) -> Costs:
    ops, costs = NativeSamplingOps(), Costs([], [], [])
    for token_id in ids:
        row = logits[0].copy()
        allowed, fill_s = timed(grammar.allowed)
        _, mask_s = timed(lambda row=row, allowed=allowed: ops.keep_allowed(row, allowed))
        assert np.isfinite(row[token_id]), f"token {token_id} breaks the grammar"
        accepted, accept_s = timed(lambda token_id=token_id: grammar.accept(token_id))
        assert accepted
        costs.fill.append(fill_s * 1e6)
        costs.mask.append(mask_s * 1e6)
        costs.accept.append(accept_s * 1e6)
    return costs


def row_of(costs: Costs) -> str:
    p50, p95 = statistics.median(costs.fill), np.percentile(costs.fill, 95)
    mask, accept = statistics.median(costs.mask), statistics.median(costs.accept)
    mean = sum(map(sum, (costs.fill, costs.mask, costs.accept))) / len(costs.fill)
    fill = f"{p50:.0f} / {p95:.0f} / {max(costs.fill):,.0f}"
    return f"{fill} | {mask:.1f} | {accept:.1f} | {mean:.0f} |"


def masking(vocab_size: int) -> list[str]:
    """Compare the native mask with its numpy twin."""
    rng = np.random.default_rng(1)
    row = rng.standard_normal(vocab_size).astype(np.float32)
    lines = ["| tokens allowed | native mask µs | numpy µs |", "|---|---|---|"]
    for name, share in (("few", 0.001), ("half", 0.5), ("nearly all", 0.999)):
        bits = rng.random((vocab_size // 32 + 2) * 32) < share
        allowed = np.packbits(bits, bitorder="little").view(np.uint32)
        times = []
        for keep in (NativeSamplingOps().keep_allowed, keep_allowed):
            times.append(statistics.median(mask_times_us(keep, row, allowed)))
        lines.append(f"| {name} | {times[0]:.1f} | {times[1]:.1f} |")
    return lines


def mask_times_us(
    keep: Callable[[np.ndarray, np.ndarray], None], row: np.ndarray, allowed: np.ndarray
) -> list[float]:
    times = []
    for _ in range(50):
        copied = row.copy()
        times.append(timed(lambda copied=copied: keep(copied, allowed))[1] * 1e6)
    return times


def timed(work: Callable[[], T]) -> tuple[T, float]:
    started_s = time.thread_time()
    result = work()
    return result, time.thread_time() - started_s


if __name__ == "__main__":
    main()
