"""A model on the native CPU kernels, with its KV memory.

Implements `Runner`. The model runs once, recording; every step replays the program that this gave.
Each row's bits depend on its own sequence only, whatever shares its step and on however many
threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from twinfire.artifacts.model_config import ModelConfig
from twinfire.artifacts.tensors import WeightSource
from twinfire.cache.kv_group import KvGroup, KvLayout, WireBuffer, WireBytes
from twinfire.engine.runner import LoadProgress
from twinfire.kernels.cpu import _native
from twinfire.kernels.cpu.lowering import lower, matrix_uses
from twinfire.kernels.cpu.native_weights import NativeWeights
from twinfire.kernels.cpu.recorder import Linear, Recorder
from twinfire.kernels.cpu.weight_cache import WeightCache
from twinfire.kernels.step_batch import StepBatch
from twinfire.models.registry import build_model
from twinfire.protocol.worker_config import Quantization

TARGET_GROUP = "target"
"""The KV group of the served model itself."""
SCALES_GROUP = "target_scales"
"""The scales of an 8-bit target group: one float for each token and head."""


class NativeRunner:
    """Made by `load_native_runner`."""

    def __init__(
        self,
        config: ModelConfig,
        weights: NativeWeights,
        program: _native.Program,
        kv_dtype: str,
        *,
        op_by_op: bool = False,
    ) -> None:
        self._config = config
        self._weights = weights
        self._program = program
        self._kv_dtype = kv_dtype
        self._op_by_op = op_by_op
        self._kv: _native.KvCache | None = None
        self._num_kept_rows: int | None = None
        self._logits = np.empty((0, config.head_width), np.float32)

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return self._config.vocab_size

    @property
    def kv_layout(self) -> KvLayout:
        """The target group, and its scales where it has 8 bits."""
        config = self._config
        layers, heads = config.num_layers, config.num_kv_heads
        target = KvGroup(TARGET_GROUP, layers, heads, config.head_dim, self._kv_dtype)
        if self._kv_dtype != "int8":
            return KvLayout((target,))
        return KvLayout((target, KvGroup(SCALES_GROUP, layers, heads, 1, "f32")))

    @property
    def weight_bytes(self) -> int:
        """Memory that the packed weights take."""
        return self._weights.num_bytes

    @property
    def weight_format(self) -> str:
        """The format that holds the most bytes of the weights."""
        return self._weights.main_format

    def save_weights(self, after_write: Callable[[], None]) -> None:
        """Keep the packed weights for the next start; `after_write` follows every few megabytes."""
        self._weights.save(after_write)

    def init_kv(self, num_blocks: int) -> None:
        """Map KV memory, once; pages are only taken as blocks are written."""
        if self._kv is not None:
            raise RuntimeError("KV memory is already allocated")
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; it must be at least 1")
        config = self._config
        self._kv = _native.KvCache(
            config.num_layers, config.num_kv_heads, config.head_dim, self._kv_dtype, num_blocks
        )

    def execute(self, batch: StepBatch) -> None:
        """Copy blocks, compute the tokens, write their KV, keep the rows of `logit_rows`."""
        self._program.run(_arrays(batch), self._allocated(), self._op_by_op)
        self._num_kept_rows = len(batch.logit_rows)

    def profile(self, batch: StepBatch) -> list[tuple[str, float]]:
        """Execute phase by phase; return what each computes and the seconds it took."""
        phases = self._program.profile(_arrays(batch), self._allocated())
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
        self._allocated().export_blocks(list(block_ids), into)

    def import_blocks(self, block_ids: Sequence[int], content: WireBytes) -> None:
        """Fill blocks from what `export_blocks` wrote; ValueError likewise."""
        self._allocated().import_blocks(list(block_ids), content)

    def _allocated(self) -> _native.KvCache:
        if self._kv is None:
            raise RuntimeError("init_kv has not been called")
        return self._kv


def _arrays(batch: StepBatch) -> _native.StepArrays:
    return (
        batch.token_ids,
        batch.positions,
        batch.slots,
        batch.query_starts,
        batch.context_lens,
        batch.block_tables,
        batch.logit_rows,
        batch.block_copies,
    )


def load_native_runner(
    config: ModelConfig,
    weights: WeightSource,
    *,
    quantization: Quantization,
    kv_dtype: str,
    num_threads: int,
    progress: LoadProgress,
    isa: str | None = None,
    op_by_op: bool = False,
    cache: WeightCache | None = None,
) -> NativeRunner:
    """Build, pack and record a model.

    `kv_dtype` is bf16 or int8, `isa` one of `_native.supported_isas()`, by default the greatest.
    With `op_by_op` every op of a step is complete before the next one begins, which gives the same
    bits in more time. `cache` spares packing what an earlier start has packed. ModelError names a
    tensor that is missing or misshapen.
    """
    total_bytes, done_bytes = weights.total_bytes, 0

    def on_bytes(num_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += num_bytes
        progress("weights", min(done_bytes, total_bytes), total_bytes)

    packed = NativeWeights(quantization, num_threads, on_bytes, cache)
    model = build_model(config, weights, packed)
    recorder = Recorder()
    logits = model.logits(recorder, model.hidden_rows(recorder))
    assert isinstance(logits, Linear), "logits come from a matrix"
    packed.pack(matrix_uses(recorder.values, logits))
    progress("weights", total_bytes, total_bytes)
    team = _native.ThreadTeam(num_threads)
    program = lower(recorder.values, logits, packed, team, isa or _native.isa(), config.vocab_size)
    return NativeRunner(config, packed, program, kv_dtype, op_by_op=op_by_op)
