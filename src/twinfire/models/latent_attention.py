"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) of a draft head's layer.

The cache holds one row a token for all heads: the normed latent that keys and values are made of,
and the key's turned part, whose pairs are stored as i and i + half whatever the file has. Keys and
values are never made: `kv_b_proj`'s key rows are multiplied into the queries and its value rows
into what was attended, which is the same sum in another order.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import numpy.typing as npt

from twinfire.artifacts.draft_head_config import DraftHeadConfig, MlaSizes
from twinfire.artifacts.tensors import MappedTensor, WeightSource
from twinfire.kernels.latent_ops import LatentStepOps, LatentWeightOps
from twinfire.kernels.ops import A, HeadLayout, LinearRef, RopeRef, StepOps, VectorRef, WeightOps
from twinfire.protocol.errors import ModelError

Rows = npt.NDArray[np.int64]


class LatentAttention:
    """One layer's attention; `rope` is a table of `qk_rope_head_dim`."""

    def __init__(
        self,
        config: DraftHeadConfig,
        mla: MlaSizes,
        weights: WeightSource,
        ops: WeightOps,
        rope: RopeRef,
        prefix: str,
    ) -> None:
        """Take the weights below `prefix`; ModelError where `ops` has no latent attention."""
        if not isinstance(ops, LatentWeightOps):
            raise ModelError(
                "the draft head's attention is mla (multi-head latent attention), which these "
                "kernels do not compute; --backend torch does"
            )
        heads, nope, turned = config.num_heads, mla.qk_nope_head_dim, mla.qk_rope_head_dim
        self._num_heads = heads
        self._eps = config.rms_norm_eps
        self._rope = rope
        self._turned = HeadLayout(heads, 1, turned)
        self._latent = HeadLayout(heads, 1, mla.cached_width, value_dim=mla.kv_lora_rank)
        self._scale = float(config.head_dim**-0.5 * mla.score_factor)

        def tensor(name: str) -> MappedTensor:
            return weights.tensor(f"{prefix}.{name}.weight")

        pairs = _halves(turned) if mla.rope_interleaved else np.arange(turned)
        self._query_down: LinearRef | None = None
        self._query_norm: VectorRef | None = None
        query = tensor("q_proj" if mla.q_lora_rank is None else "q_b_proj")
        if mla.q_lora_rank is not None:
            self._query_down = ops.linear([tensor("q_a_proj")])
            self._query_norm = ops.vector(tensor("q_a_layernorm"))
        by_head = _by_head(heads, nope + turned)
        self._query = ops.linear([_rows(query, by_head[:, :nope])])
        self._query_turned = ops.linear([_rows(query, by_head[:, nope:][:, pairs])])
        down, latent = tensor("kv_a_proj_with_mqa"), np.arange(mla.kv_lora_rank)
        self._down = ops.linear([_rows(down, latent)])
        self._key_turned = ops.linear([_rows(down, mla.kv_lora_rank + pairs)])
        self._down_norm = ops.vector(tensor("kv_a_layernorm"))
        up, by_head = tensor("kv_b_proj"), _by_head(heads, nope + mla.v_head_dim)
        self._keys = ops.per_head(_rows(up, by_head[:, :nope]), heads, transposed=True)
        self._values = ops.per_head(_rows(up, by_head[:, nope:]), heads)
        self._output = ops.linear([tensor("o_proj")])

    def __call__(self, ops: StepOps[A], x: A, layer: int) -> A:
        """Store the rows' latents and return what they attend to, [T, hidden]."""
        # The set that took the weights has them.
        latent_ops = cast("LatentStepOps[A]", ops)
        latent = ops.rms_norm(ops.linear(x, self._down), self._down_norm, self._eps)
        key_turned = ops.linear(x, self._key_turned)
        if self._query_down is not None and self._query_norm is not None:
            x = ops.rms_norm(ops.linear(x, self._query_down), self._query_norm, self._eps)
        # The one key head follows the query heads, so both parts are joined for all at once.
        turned = ops.concat([ops.linear(x, self._query_turned), key_turned])
        turned = ops.rope(turned, self._turned, self._rope)
        queries = latent_ops.per_head(ops.linear(x, self._query), self._keys)
        fused = latent_ops.join_heads([ops.concat([queries, latent]), turned], self._num_heads + 1)
        ops.write_kv(fused, self._latent, layer)
        attended = ops.attention(fused, self._latent, layer, None, self._scale)
        return ops.linear(latent_ops.per_head(attended, self._values), self._output)


def _by_head(num_heads: int, head_rows: int) -> Rows:
    return np.arange(num_heads * head_rows, dtype=np.int64).reshape(num_heads, head_rows)


def _halves(width: int) -> Rows:
    """Return which row comes where when pairs (2i, 2i + 1) become (i, i + half)."""
    return np.arange(width, dtype=np.int64).reshape(-1, 2).T.reshape(-1)


def _rows(tensor: MappedTensor, rows: Rows) -> MappedTensor:
    rows = rows.reshape(-1)
    shape = (len(rows), *tensor.shape[1:])
    return MappedTensor(tensor.name, shape, tensor.format, tensor.raw[rows])
