"""An EAGLE-3 head on the native CPU kernels, beside the target whose features it reads.

Implements `DraftRunner` with two recorded programs: one over the target's features, one over the
head's own output. Both, the choice of tokens included, replay in one call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from twinfire.artifacts.draft_head import DraftHead
from twinfire.artifacts.model_config import ModelConfig
from twinfire.engine.draft_runner import (
    DRAFT_GROUP,
    DRAFT_SCALES_GROUP,
    DraftedTokens,
    Float32Array,
    check_fused,
)
from twinfire.engine.native_fused_rows import FusedReader, FusedWriter, record_fused
from twinfire.engine.native_kv import CacheShape, NativeKv
from twinfire.kernels.cpu._native import KeptRows, PackedMatrix, Program, ThreadTeam
from twinfire.kernels.cpu.lowering import KeptLinks, lower, matrix_uses
from twinfire.kernels.cpu.native_weights import MatrixUse, NativeWeights, PlainTable
from twinfire.kernels.cpu.recorder import Linear, Recorder, Value
from twinfire.kernels.cpu.step_arrays import step_arrays
from twinfire.kernels.cpu.weight_cache import WeightCache
from twinfire.kernels.ops import StepOps
from twinfire.kernels.step_batch import Int32Array, StepBatch
from twinfire.models.eagle3_head import Eagle3Head
from twinfire.protocol.errors import ModelError

KV_INDEX = 1
"""Which cache of `NativeKv` is the head's."""
HEAD_DIM_MULTIPLE = 16
MATRIX_FORMAT = "int8"
FEATURE_FORMAT = "bf16"


class NativeDraftRunner:
    """Made by `load_native_draft`."""

    def __init__(
        self,
        head: DraftHead,
        weights: NativeWeights,
        first: Program,
        further: Program,
        reader: FusedReader,
        writer: FusedWriter,
        kv: NativeKv,
        *,
        op_by_op: bool,
    ) -> None:
        self._draft_ids = head.draft_ids
        self._width = head.config.hidden_size
        self._reader = reader
        self._writer = writer
        self._weights = weights
        self._first = first
        self._further = further
        self._kv = kv
        self._op_by_op = op_by_op

    @property
    def fused_width(self) -> int:
        """Elements of a row of `fused_rows`."""
        return self._width

    @property
    def weight_bytes(self) -> int:
        """Memory of the head's packed weights, without the target's embedding."""
        return self._weights.num_bytes

    def save_weights(self, after_write: Callable[[], None]) -> None:
        """Keep the packed weights for the next start; `after_write` follows every few megabytes."""
        self._weights.save(after_write)

    def first(self, batch: StepBatch, feature_rows: Int32Array) -> DraftedTokens:
        """Draft from the target's rows `feature_rows`; ValueError on a row that is none."""
        return self._run(self._first, batch, feature_rows)

    def further(self, batch: StepBatch, kept_rows: Int32Array) -> DraftedTokens:
        """Draft from the head's own rows `kept_rows`; ValueError on a row that is none."""
        return self._run(self._further, batch, kept_rows)

    def fused_rows(self, feature_rows: Int32Array) -> Float32Array:
        """Return what `first` makes of the target's rows; ValueError on a row that is none."""
        return self._reader.read(feature_rows, self._kv.cache(KV_INDEX))

    def first_from(self, batch: StepBatch, fused: Float32Array) -> DraftedTokens:
        """Draft from rows of `fused_rows`; ValueError on rows of another number or width."""
        check_fused(fused, batch.num_tokens, self._width)
        self._writer.write(fused, self._kv.cache(KV_INDEX))
        return self._run(self._further, batch, np.arange(len(fused), dtype=np.int32))

    def _run(self, program: Program, batch: StepBatch, kept_rows: Int32Array) -> DraftedTokens:
        num_rows = len(batch.logit_rows)
        columns, shares = np.empty(num_rows, np.int64), np.empty(num_rows, np.float32)
        cache = self._kv.cache(KV_INDEX)
        program.run_greedy(
            step_arrays(batch), kept_rows, cache, columns, shares, one_by_one=self._op_by_op
        )
        ids = columns if self._draft_ids is None else self._draft_ids[columns]
        return DraftedTokens(ids, shares)


@dataclass(frozen=True, slots=True)
class DraftTarget:
    """What a head takes of its target."""

    config: ModelConfig
    embedding: PackedMatrix | PlainTable
    features: KeptRows
    """[rows, `feature_width`], written by the target's program."""


def feature_width(head: DraftHead) -> int:
    """Return the elements of all features of a row, side by side."""
    return max(1, len(head.config.feature_layers)) * head.config.target_hidden_size


def draft_cache_shape(head: DraftHead, dtype: str) -> CacheShape:
    """Return the shape of the head's KV; ModelError when no kernel has its width."""
    config = head.config
    if config.attention != "llama":
        raise ModelError(
            f"the draft head's attention is {config.attention} (multi-head latent attention), "
            "which the native kernels do not compute; --backend torch does"
        )
    if config.head_dim % HEAD_DIM_MULTIPLE:
        raise ModelError(
            f"the draft head's head_dim {config.head_dim} is not a multiple of "
            f"{HEAD_DIM_MULTIPLE}, which the native kernels need"
        )
    return CacheShape(
        DRAFT_GROUP,
        DRAFT_SCALES_GROUP,
        config.num_layers,
        config.num_kv_heads,
        config.head_dim,
        dtype,
    )


def load_native_draft(
    head: DraftHead,
    target: DraftTarget,
    kv: NativeKv,
    team: ThreadTeam,
    *,
    isa: str,
    op_by_op: bool,
    on_bytes: Callable[[int], None],
    cache: WeightCache | None,
) -> NativeDraftRunner:
    """Build, pack and record a head; ModelError names what is missing or does not fit.

    Its matrices have 8 bits whatever the target's have: that takes half the time of 16 bits, and a
    worse draft costs time alone. What multiplies the target's features keeps 16, because a few of
    their values are a thousand times the others.
    """
    weights = NativeWeights("none", team.num_threads, on_bytes, cache)
    shared = weights.share_embedding(target.embedding, target.config.hidden_size)
    body = Eagle3Head(head.config, head.weights, weights, shared)

    def record(draft: Callable[[StepOps[Value]], Value]) -> tuple[Recorder, Linear]:
        recorder = Recorder()
        logits = body.logits(recorder, draft(recorder))
        assert isinstance(logits, Linear), "logits come from a matrix"
        return recorder, logits

    first, first_logits = record(body.first)
    further, further_logits = record(body.further)
    fused, fused_rows = record_fused(body, weights)
    uses = {
        index: replace(use, format=MATRIX_FORMAT)
        for index, use in matrix_uses(first.values, first_logits).items()
    }
    uses[fused_rows.weight.index] = MatrixUse(format=FEATURE_FORMAT)
    weights.pack(uses)
    own_rows = KeptRows(head.config.hidden_size)

    def program(recorder: Recorder, logits: Linear, read: KeptRows) -> Program:
        links = KeptLinks(recorder.features, written=own_rows, read=read)
        vocab_size = target.config.vocab_size
        return lower(recorder.values, logits, weights, team, isa, vocab_size, links)

    return NativeDraftRunner(
        head,
        weights,
        program(first, first_logits, target.features),
        program(further, further_logits, own_rows),
        FusedReader(program(fused, fused_rows, target.features), head.config.hidden_size),
        FusedWriter(own_rows, team, isa),
        kv,
        op_by_op=op_by_op,
    )
