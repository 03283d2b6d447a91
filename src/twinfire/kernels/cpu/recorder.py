"""What a model computes in a step, written down by running it once.

Implements `StepOps` on values that are only descriptions. Keeps them in order and computes
nothing; `lowering` makes a program of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from twinfire.kernels.ops import EmbeddingRef, HeadLayout, LinearRef, RopeRef, VectorRef


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """One op's result. Values are told apart by identity, not by content."""


@dataclass(frozen=True, slots=True, eq=False)
class Embed(Value):
    """Rows of a table."""

    table: EmbeddingRef


@dataclass(frozen=True, slots=True, eq=False)
class RmsNorm(Value):
    """Normed rows."""

    x: Value
    weight: VectorRef
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class Add(Value):
    """The sum of both."""

    x: Value
    residual: Value


@dataclass(frozen=True, slots=True, eq=False)
class Linear(Value):
    """Multiplied rows."""

    x: Value
    weight: LinearRef


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorm(Value):
    """Fused rows with normed queries and keys."""

    qkv: Value
    query: VectorRef
    key: VectorRef
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class Rope(Value):
    """Fused rows with turned queries and keys."""

    qkv: Value
    table: RopeRef


@dataclass(frozen=True, slots=True, eq=False)
class Attention(Value):
    """Attended rows of fused ones whose keys and values were stored."""

    qkv: Value
    heads: HeadLayout
    layer: int
    window: int | None
    scale: float


@dataclass(frozen=True, slots=True, eq=False)
class SiluMul(Value):
    """Gated rows."""

    gate_up: Value


@dataclass(frozen=True, slots=True, eq=False)
class TakeLogitRows(Value):
    """The rows whose logits the step wants."""

    x: Value


@dataclass(frozen=True, slots=True, eq=False)
class KeptFeature(Value):
    """Rows that another step kept."""

    index: int
    width: int


@dataclass(frozen=True, slots=True, eq=False)
class Concat(Value):
    """Rows side by side."""

    parts: tuple[Value, ...]


def operands(value: Value) -> tuple[Value, ...]:
    """Return the values that `value` is computed from."""
    match value:
        case RmsNorm(x) | Linear(x) | TakeLogitRows(x):
            return (x,)
        case Add(x, residual):
            return (x, residual)
        case HeadNorm(qkv) | Rope(qkv) | Attention(qkv):
            return (qkv,)
        case SiluMul(gate_up):
            return (gate_up,)
        case Concat(parts):
            return parts
        case _:
            return ()


def needed_for(values: list[Value], result: Value) -> list[Value]:
    """Return what `result` is computed from, in order, itself included."""
    needed = {result}
    for value in reversed(values):
        if value in needed:
            needed.update(operands(value))
    return [value for value in values if value in needed]


def readers_of(values: list[Value]) -> dict[Value, list[Value]]:
    """Return who reads each of `values`, in order."""
    readers: dict[Value, list[Value]] = {value: [] for value in values}
    for value in values:
        for operand in operands(value):
            readers[operand].append(value)
    return readers


@dataclass(slots=True)
class Recorder:
    """Records one run."""

    values: list[Value] = field(default_factory=list)
    """In the order of computation."""
    stored: dict[int, Value] = field(default_factory=dict)
    """The fused rows that `write_kv` was given, by layer."""
    features: dict[int, Value] = field(default_factory=dict)
    """The rows that `keep_feature` was given, by number."""

    def embed(self, table: EmbeddingRef) -> Value:
        """Record."""
        return self._record(Embed(table))

    def rms_norm(self, x: Value, weight: VectorRef, eps: float) -> Value:
        """Record."""
        return self._record(RmsNorm(x, weight, eps))

    def add_rms_norm(
        self, x: Value, residual: Value, weight: VectorRef, eps: float
    ) -> tuple[Value, Value]:
        """Record as a sum and its norm."""
        total = self._record(self._sum(x, residual))
        return self.rms_norm(total, weight, eps), total

    def linear(self, x: Value, weight: LinearRef) -> Value:
        """Record."""
        return self._record(Linear(x, weight))

    def head_norm(
        self, qkv: Value, heads: HeadLayout, query: VectorRef, key: VectorRef, eps: float
    ) -> Value:
        """Record."""
        return self._record(HeadNorm(qkv, query, key, eps))

    def rope(self, qkv: Value, heads: HeadLayout, table: RopeRef) -> Value:
        """Record."""
        return self._record(Rope(qkv, table))

    def write_kv(self, qkv: Value, heads: HeadLayout, layer: int) -> None:
        """Record what the layer stores."""
        self.stored[layer] = qkv

    def attention(
        self, qkv: Value, heads: HeadLayout, layer: int, window: int | None, scale: float
    ) -> Value:
        """Record."""
        assert self.stored.get(layer) is qkv, f"layer {layer} attends to what it has not stored"
        return self._record(Attention(qkv, heads, layer, window, scale))

    def silu_mul(self, gate_up: Value) -> Value:
        """Record."""
        return self._record(SiluMul(gate_up))

    def keep_feature(self, x: Value, index: int) -> None:
        """Record which rows are wanted."""
        self.features[index] = x

    def kept_feature(self, index: int, width: int) -> Value:
        """Record."""
        return self._record(KeptFeature(index, width))

    def concat(self, parts: Sequence[Value]) -> Value:
        """Record."""
        return self._record(Concat(tuple(parts)))

    def take_logit_rows(self, x: Value) -> Value:
        """Record."""
        return self._record(TakeLogitRows(x))

    def _sum(self, x: Value, residual: Value) -> Value:
        if isinstance(x, TakeLogitRows) and isinstance(residual, TakeLogitRows):
            # Rows are taken once, of a sum that the matrix before can add up in place.
            return TakeLogitRows(self._record(Add(x.x, residual.x)))
        return Add(x, residual)

    def _record(self, value: Value) -> Value:
        self.values.append(value)
        return value
