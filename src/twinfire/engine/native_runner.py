"""A model on the native CPU kernels, with its KV memory.

Implements `Runner`. The model runs once, recording; every step replays the program that this gave.
Each row's bits depend on its own sequence only, whatever shares its step and on however many
threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from twinfire.artifacts.draft_head import DraftHead
from twinfire.artifacts.model_config import ModelConfig
from twinfire.artifacts.tensors import WeightSource
from twinfire.cache.kv_group import KvLayout, WireBuffer, WireBytes
from twinfire.engine.feature_layers import feature_layers_of
from twinfire.engine.native_draft import (
    DraftTarget,
    NativeDraftRunner,
    draft_cache_shape,
    feature_width,
    load_native_draft,
)
from twinfire.engine.native_kv import CacheShape, NativeKv
from twinfire.engine.runner import LoadProgress
from twinfire.kernels.cpu import _native
from twinfire.kernels.cpu.lowering import KeptLinks, lower, matrix_uses
from twinfire.kernels.cpu.native_weights import NativeWeights
from twinfire.kernels.cpu.recorder import Linear, Recorder
from twinfire.kernels.cpu.step_arrays import step_arrays
from twinfire.kernels.cpu.weight_cache import WeightCache
from twinfire.kernels.step_batch import StepBatch
from twinfire.models.registry import build_model
from twinfire.protocol.worker_config import Quantization

TARGET_GROUP = "target"
"""The KV group of the served model itself."""
SCALES_GROUP = "target_scales"
"""The scales of an 8-bit target group: one float for each token and head."""


class NativeRunner:
    """Made by `load_native_runner`. `draft` is the head beside the model, if it has one."""

    def __init__(
        self,
        config: ModelConfig,
        weights: NativeWeights,
        program: _native.Program,
        kv: NativeKv,
        draft: NativeDraftRunner | None,
        *,
        op_by_op: bool,
    ) -> None:
        self.draft = draft
        self._config = config
        self._weights = weights
        self._program = program
        self._kv = kv
        self._op_by_op = op_by_op
        self._num_kept_rows: int | None = None
        self._logits = np.empty((0, config.head_width), np.float32)

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return self._config.vocab_size

    @property
    def kv_layout(self) -> KvLayout:
        """The target group and its scales where it has 8 bits, then the same of a draft head."""
        return self._kv.layout

    @property
    def weight_bytes(self) -> int:
        """Memory that the packed weights take, a draft head's included."""
        return self._weights.num_bytes + (self.draft.weight_bytes if self.draft else 0)

    @property
    def weight_format(self) -> str:
        """The format that holds the most bytes of the weights."""
        return self._weights.main_format

    def save_weights(self, after_write: Callable[[], None]) -> None:
        """Keep the packed weights for the next start; `after_write` follows every few megabytes."""
        self._weights.save(after_write)
        if self.draft is not None:
            self.draft.save_weights(after_write)

    def init_kv(self, num_blocks: int) -> None:
        """Map KV memory, once; pages are only taken as blocks are written."""
        self._kv.allocate(num_blocks)

    def populate_kv(self, first: int, count: int) -> None:
        """Take the pages of blocks [first, first + count) from the system; may run beside steps."""
        self._kv.populate(first, count)

    def execute(self, batch: StepBatch) -> None:
        """Copy blocks, compute the tokens, write their KV, keep the rows of `logit_rows`."""
        self._kv.copy_to_heads(batch.block_copies)
        self._program.run(step_arrays(batch), self._kv.cache(0), self._op_by_op)
        self._num_kept_rows = len(batch.logit_rows)

    def profile(self, batch: StepBatch) -> list[tuple[str, float]]:
        """Execute phase by phase; return what each computes and the seconds it took."""
        self._kv.copy_to_heads(batch.block_copies)
        phases = self._program.profile(step_arrays(batch), self._kv.cache(0))
        self._num_kept_rows = len(batch.logit_rows)
        return phases

    def logits(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Return float32 logits [stop - start, vocab_size] of kept rows [start, stop)."""
        if self._num_kept_rows is None:
            raise RuntimeError("nothing has been executed")
        if not 0 <= start <= stop <= self._num_kept_rows:
            raise ValueError(f"rows [{start}, {stop}) of {self._num_kept_rows} kept rows")
        count = stop - start
        if count > len(self._logits):
            self._logits = np.empty((count, self._config.head_width), np.float32)
        if count:
            self._program.logits(start, stop, self._logits[:count])
        return self._logits[:count]

    def export_blocks(self, block_ids: Sequence[int], into: WireBuffer) -> None:
        """Write the blocks to `into`; ValueError on a block that is none or a wrong size."""
        self._kv.export_blocks(block_ids, into)

    def import_blocks(self, block_ids: Sequence[int], content: WireBytes) -> None:
        """Fill blocks from what `export_blocks` wrote; ValueError likewise."""
        self._kv.import_blocks(block_ids, content)


def load_native_runner(
    config: ModelConfig,
    weights: WeightSource,
    *,
    quantization: Quantization,
    kv_dtype: str,
    num_threads: int,
    num_borrowed_threads: int = 0,
    progress: LoadProgress,
    isa: str | None = None,
    op_by_op: bool = False,
    cache: WeightCache | None = None,
    head: DraftHead | None = None,
    head_cache: WeightCache | None = None,
) -> NativeRunner:
    """Build, pack and record a model, and the draft `head` beside it.

    `num_borrowed_threads` compute beside the others where cores would be idle. `kv_dtype` is bf16
    or int8, `isa` one of `_native.supported_isas()`, by default the greatest.
    With `op_by_op` every op of a step is complete before the next one begins, which gives the same
    bits in more time. `cache` and `head_cache` spare packing what an earlier start has packed.
    ModelError names a tensor that is missing or misshapen, and what does not fit of a head.
    """
    features = feature_layers_of(head, config)
    total_bytes, done_bytes = weights.total_bytes, 0
    if head is not None:
        total_bytes += head.weights.total_bytes

    def on_bytes(num_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += num_bytes
        progress("weights", min(done_bytes, total_bytes), total_bytes)

    packed = NativeWeights(quantization, num_threads, on_bytes, cache)
    model = build_model(config, weights, packed)
    recorder = Recorder()
    hidden_rows = model.hidden_rows(recorder, features.layers, keep_final=features.keep_final)
    logits = model.logits(recorder, hidden_rows)
    assert isinstance(logits, Linear), "logits come from a matrix"
    packed.pack(matrix_uses(recorder.values, logits))
    num_all_threads = num_threads + num_borrowed_threads
    team = _native.ThreadTeam(num_all_threads, num_own_threads=num_threads)
    isa = isa or _native.isa()
    target_shape = CacheShape(
        TARGET_GROUP,
        SCALES_GROUP,
        config.num_layers,
        config.num_kv_heads,
        config.head_dim,
        kv_dtype,
    )
    draft, kept, kv = None, KeptLinks(), NativeKv([target_shape])
    if head is not None:
        kept_rows = _native.KeptRows(feature_width(head))
        kept = KeptLinks(recorder.features, written=kept_rows)
        kv = NativeKv([target_shape, draft_cache_shape(head, kv_dtype)])
        target = DraftTarget(config, packed.embedding_at(model.embedding), kept_rows)
        draft = load_native_draft(
            head,
            target,
            kv,
            team,
            isa=isa,
            op_by_op=op_by_op,
            on_bytes=on_bytes,
            cache=head_cache,
        )
    progress("weights", total_bytes, total_bytes)
    values, vocab_size = recorder.values, config.vocab_size
    program = lower(values, logits, packed, team, isa, vocab_size, kept)
    return NativeRunner(config, packed, program, kv, draft, op_by_op=op_by_op)
