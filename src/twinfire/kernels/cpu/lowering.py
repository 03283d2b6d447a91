"""From a recorded run to a program: which ops become one node, and where their rows lie.

A sum is added into the residual by the matrix before it; silu(gate) * up, bf16 and 8-bit rows are
written by whoever computes them in the form that the next matrix reads; queries and keys are
normed, turned and stored by the attention. What a model writes in another way than decoders do is
refused, never computed approximately.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from twinfire.kernels.cpu._native import KeptRows, PackedMatrix, Program, ThreadTeam
from twinfire.kernels.cpu.native_weights import MatrixUse, NativeWeights, PlainTable
from twinfire.kernels.cpu.recorder import (
    Add,
    Attention,
    Concat,
    Embed,
    HeadNorm,
    KeptFeature,
    Linear,
    RmsNorm,
    Rope,
    SiluMul,
    TakeLogitRows,
    Value,
    needed_for,
    readers_of,
)
from twinfire.kernels.ops import HeadLayout

_SILU_MUL = {
    "bf16": ("silu_mul_bf16", "bf16"),
    "int8": ("silu_mul_f32", "f32"),
    "int8_groups": ("silu_mul_int8_groups", "int8_groups"),
}
"""By what the next matrix reads: how the gated matrix ends, and what it leaves."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A buffer of the program with the rows of one value."""

    buffer: int
    format: str
    width: int
    per_logit_row: bool


@dataclass(frozen=True, slots=True)
class KeptLinks:
    """What a program keeps for another, and what it reads of another's.

    Features lie side by side in a kept row, in order and all of one width.
    """

    features: dict[int, Value] = field(default_factory=dict)
    """What the recorded run keeps, by number."""
    written: KeptRows | None = None
    read: KeptRows | None = None


def matrix_uses(values: list[Value], logits: Linear) -> dict[int, MatrixUse]:
    """Return how the recorded run uses its matrices, by the index of their references."""
    gated = {
        value.gate_up.weight.index
        for value in values
        if isinstance(value, SiluMul) and isinstance(value.gate_up, Linear)
    }
    indices = {value.weight.index for value in values if isinstance(value, Linear)}
    return {
        index: MatrixUse(is_gated=index in gated, is_head=index == logits.weight.index)
        for index in indices
    }


def lower(
    values: list[Value],
    logits: Linear,
    weights: NativeWeights,
    team: ThreadTeam,
    isa: str,
    vocab_size: int,
    kept: KeptLinks | None = None,
) -> Program:
    """Return the program that computes `logits` of `vocab_size` ids, its weights being packed."""
    program = Program(team, isa, vocab_size)
    return _Lowering(values, logits, weights, program, kept or KeptLinks()).run()


class _Lowering:
    def __init__(
        self,
        values: list[Value],
        logits: Linear,
        weights: NativeWeights,
        program: Program,
        kept: KeptLinks,
    ) -> None:
        self._values = needed_for(values, logits)
        self._logits = logits
        self._weights = weights
        self._program = program
        self._kept = kept
        self._kept_numbers = {value: number for number, value in kept.features.items()}
        self._readers = readers_of(self._values)
        self._unread = Counter({value: len(readers) for value, readers in self._readers.items()})
        self._rows: dict[Value, Rows] = {}
        self._free: list[Rows] = []
        self._ropes: dict[int, int] = {}

    def run(self) -> Program:
        for value in self._values:
            match value:
                case Embed():
                    self._embed(value)
                case RmsNorm():
                    self._norm(value)
                case Linear():
                    self._linear(value)
                case Attention():
                    self._attention(value)
                case TakeLogitRows():
                    self._take_rows(value)
                case KeptFeature():
                    self._kept_feature(value)
                case Concat():
                    self._concat(value)
                case HeadNorm() | Rope() | Add() | SiluMul():
                    pass  # Part of the node of what they are computed from or for.
        return self._program

    def _embed(self, value: Embed) -> None:
        table = self._weights.embedding_at(value.table)
        rows = self._place(value, "f32", value.table.width, per_logit_row=False)
        if isinstance(table, PlainTable):
            self._program.add_embed_plain(table.content, table.format, rows.buffer)
        else:
            self._program.add_embed_packed(table, rows.buffer)
        self._keep(value)

    def _norm(self, value: RmsNorm) -> None:
        if self._is_joined(value):
            return
        source = self._rows_of(value.x)
        weight = self._weights.vector_at(value.weight)
        rows = self._place(value, self._format_read(value), source.width, source.per_logit_row)
        self._program.add_norm(source.buffer, weight.tolist(), value.eps, rows.buffer)
        self._keep(value)
        self._release(value.x)

    def _linear(self, value: Linear) -> None:
        matrix = self._weights.matrix_at(value.weight)
        source = self._as_read(value.x, matrix)
        if value is self._logits:
            self._program.set_head(matrix, source.buffer)
            return
        readers = self._readers[value]
        reader = readers[0] if len(readers) == 1 else None
        match reader:
            case Add(x, residual) if x is value:
                epilogue, target = "add_f32", self._rows_of(residual)
                assert self._unread[residual] == 1, "a residual is read after it was added to"
                self._rows[reader] = target
            case SiluMul():
                epilogue, format_name = _SILU_MUL[self._format_read(reader)]
                target = self._place(reader, format_name, matrix.out_columns, source.per_logit_row)
            case HeadNorm() | Rope() | Attention() | RmsNorm() | None:
                epilogue = "store_f32"
                target = self._place(value, "f32", matrix.n, source.per_logit_row)
            case _:
                raise NotImplementedError(f"a matrix before {type(reader).__name__}")
        sole_reader = len(self._readers[value.x]) == 1
        self._program.add_gemm(matrix, source.buffer, epilogue, target.buffer, sole_reader)
        if isinstance(reader, Add):
            self._keep(reader)
        if source is not self._rows_of(value.x):
            self._free.append(source)
        self._release(value.x)

    def _attention(self, value: Attention) -> None:
        fused, query_norm, key_norm, eps, rope = value.qkv, [], [], 0.0, None
        if isinstance(fused, Rope):
            rope, fused = self._rope(fused), fused.qkv
        if isinstance(fused, HeadNorm):
            query_norm = self._weights.vector_at(fused.query).tolist()
            key_norm = self._weights.vector_at(fused.key).tolist()
            eps, fused = fused.eps, fused.qkv
        source = self._rows_of(fused)
        heads: HeadLayout = value.heads
        format_name = "bf16" if self._format_read(value) == "bf16" else "f32"
        rows = self._place(value, format_name, heads.query_width, source.per_logit_row)
        self._program.add_attention(
            (heads.num_heads, heads.num_kv_heads, heads.head_dim),
            value.layer,
            source.buffer,
            query_norm,
            key_norm,
            eps,
            rope,
            value.window or 0,
            value.scale,
            rows.buffer,
        )
        self._release(fused)

    def _take_rows(self, value: TakeLogitRows) -> None:
        source = self._rows_of(value.x)
        rows = self._place(value, source.format, source.width, per_logit_row=True)
        self._program.add_take_rows(source.buffer, rows.buffer)
        self._keep(value)
        self._release(value.x)

    def _kept_feature(self, value: KeptFeature) -> None:
        if self._is_joined(value):
            return
        rows = self._place(value, self._format_read(value), value.width, per_logit_row=False)
        self._program.add_join([_kept_part(value)], self._kept.read, rows.buffer)

    def _concat(self, value: Concat) -> None:
        parts, read = [], []
        for part in value.parts:
            source, weight, eps = part, list[float](), 0.0
            if isinstance(part, RmsNorm) and self._is_joined(part):
                source, eps = part.x, part.eps
                weight = self._weights.vector_at(part.weight).tolist()
            if isinstance(source, KeptFeature) and self._is_joined(source):
                buffer, column, width, _, _ = _kept_part(source)
            else:
                rows = self._rows_of(source)
                assert rows.format == "f32", f"{rows.format} rows in a concatenation"
                buffer, column, width = rows.buffer, 0, rows.width
                read.append(source)
            parts.append((buffer, column, width, weight, eps))
        width = sum(part[2] for part in parts)
        joined = self._place(value, self._format_read(value), width, per_logit_row=False)
        self._program.add_join(parts, self._kept.read, joined.buffer)
        for source in read:
            self._release(source)

    def _is_joined(self, value: Value) -> bool:
        """Whether `value` is computed by the concatenation that alone reads it."""
        match value:
            case RmsNorm() if value not in self._kept_numbers:
                return all(isinstance(reader, Concat) for reader in self._readers[value])
            case KeptFeature():
                return all(
                    isinstance(reader, Concat)
                    or (isinstance(reader, RmsNorm) and self._is_joined(reader))
                    for reader in self._readers[value]
                )
            case _:
                return False

    def _keep(self, value: Value) -> None:
        """Keep the rows of `value`, just computed, if the run did."""
        number = self._kept_numbers.get(value)
        if number is not None and self._kept.written is not None:
            rows = self._rows_of(value)
            self._program.add_keep_rows(rows.buffer, self._kept.written, number * rows.width)

    def _rope(self, value: Rope) -> int:
        index = value.table.index
        if index not in self._ropes:
            table = self._weights.rope_at(value.table)
            self._ropes[index] = self._program.add_rope(
                table.inv_freq.tolist(), table.attention_factor
            )
        return self._ropes[index]

    def _as_read(self, value: Value, matrix: PackedMatrix) -> Rows:
        """Return the rows of `value` in the form that `matrix` reads."""
        rows = self._rows_of(value)
        if rows.format == matrix.input_format:
            return rows
        assert rows.format == "f32", f"{rows.format} rows before a {matrix.format} matrix"
        converted = self._buffer(matrix.input_format, rows.width, rows.per_logit_row)
        self._program.add_convert(rows.buffer, converted.buffer)
        return converted

    def _format_read(self, value: Value) -> str:
        """Return the form that all who read `value` want, f32 where they differ."""
        formats = {
            self._weights.matrix_at(reader.weight).input_format
            if isinstance(reader, Linear)
            else "f32"
            for reader in self._readers[value]
        }
        if value in self._kept_numbers:
            formats.add("f32")
        return formats.pop() if len(formats) == 1 else "f32"

    def _rows_of(self, value: Value) -> Rows:
        if value not in self._rows:
            raise NotImplementedError(f"{type(value).__name__} in a place of its own")
        return self._rows[value]

    def _place(self, value: Value, format_name: str, width: int, per_logit_row: bool) -> Rows:
        rows = self._buffer(format_name, width, per_logit_row)
        self._rows[value] = rows
        return rows

    def _buffer(self, format_name: str, width: int, per_logit_row: bool) -> Rows:
        for rows in self._free:
            if (rows.format, rows.width, rows.per_logit_row) == (format_name, width, per_logit_row):
                self._free.remove(rows)
                return rows
        buffer = self._program.add_buffer(format_name, width, per_logit_row)
        return Rows(buffer, format_name, width, per_logit_row)

    def _release(self, value: Value) -> None:
        """Note that one reader of `value` is done; the last one frees its buffer."""
        self._unread[value] -= 1
        if self._unread[value] <= 0:
            self._free.append(self._rows[value])


def _kept_part(value: KeptFeature) -> tuple[int, int, int, list[float], float]:
    return -1, value.index * value.width, value.width, [], 0.0
