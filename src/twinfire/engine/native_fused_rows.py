"""A native draft head's fused rows as numpy's arrays: what it drafts from, sent and received.

What programs keep for each other is theirs alone, so both ways are programs too: one whose logits
are the fused rows, one that reads numpy's rows as an embedding and keeps them.
"""

from __future__ import annotations

import numpy as np

from twinfire.artifacts.tensors import MappedTensor
from twinfire.cache.kv_group import BLOCK_SIZE
from twinfire.engine.draft_runner import Float32Array
from twinfire.engine.spans import pack_rows
from twinfire.kernels.cpu._native import KeptRows, KvCache, Program, ThreadTeam
from twinfire.kernels.cpu.native_weights import NativeWeights
from twinfire.kernels.cpu.recorder import Linear, Recorder
from twinfire.kernels.cpu.step_arrays import step_arrays
from twinfire.kernels.step_batch import Int32Array
from twinfire.models.eagle3_head import Eagle3Head


def record_fused(body: Eagle3Head, weights: NativeWeights) -> tuple[Recorder, Linear]:
    """Return a run whose logits are the fused rows; declares a matrix for a head that has none."""
    recorder = Recorder()
    fused = body.fused(recorder)
    if not isinstance(fused, Linear):
        identity = np.eye(body.width, dtype=np.float32)
        tensor = MappedTensor("identity", identity.shape, "f32", identity)
        fused = recorder.linear(fused, weights.linear([tensor]))
    assert isinstance(fused, Linear), "a recorder records what it is told"
    return recorder, fused


class FusedReader:
    """Takes fused rows out of `program`, made of what `record_fused` returned."""

    def __init__(self, program: Program, width: int) -> None:
        self._program = program
        self._width = width

    def read(self, feature_rows: Int32Array, kv: KvCache) -> Float32Array:
        """Return [len(feature_rows), width]; ValueError on a row that the target has not kept."""
        count = len(feature_rows)
        fused = np.empty((count, self._width), np.float32)
        if count:
            # Which column is the greatest is of no use; only this call takes kept rows.
            columns, shares = np.empty(count, np.int64), np.empty(count, np.float32)
            arrays = step_arrays(pack_rows([0] * count, BLOCK_SIZE))
            self._program.run_greedy(arrays, feature_rows, kv, columns, shares)
            self._program.logits(0, count, fused)
        return fused


class FusedWriter:
    """Puts fused rows where a head keeps its own."""

    def __init__(self, own_rows: KeptRows, team: ThreadTeam, isa: str) -> None:
        self._own_rows = own_rows
        self._team = team
        self._isa = isa
        self._table = np.empty((0, own_rows.width), np.float32)
        self._program: Program | None = None

    def write(self, fused: Float32Array, kv: KvCache) -> None:
        """Keep `fused` [rows, width] as if the head's last call had given it."""
        if self._program is None or len(fused) > len(self._table):
            self._program = self._make_program(max(8, 2 * len(fused)))
        self._table[: len(fused)] = fused
        self._program.run(step_arrays(pack_rows(range(len(fused)), BLOCK_SIZE)), kv)

    def _make_program(self, num_rows: int) -> Program:
        """Return a program that keeps the rows of a new table of so many, by their number."""
        self._table = np.zeros((num_rows, self._own_rows.width), np.float32)
        program = Program(self._team, self._isa, num_rows)
        rows = program.add_buffer("f32", self._own_rows.width, per_logit_row=False)
        program.add_embed_plain(self._table.reshape(-1).view(np.uint8), "f32", rows)
        program.add_keep_rows(rows, self._own_rows, 0)
        return program
