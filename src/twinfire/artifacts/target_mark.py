"""Which weights a draft head was trained for, told by the target's embedding table.

A head drafts well for the weights that it saw. Another format of the same weights has nearly the
same table, another fine-tune a similar one, another model of the same shape a different one.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import replace
from hashlib import sha256
from typing import Literal

import msgspec
import numpy as np

from twinfire.artifacts.model_config import ModelConfig
from twinfire.artifacts.tensors import WeightSource

MARK_FIELD = "twinfire_target"
"""Of a head's config.json."""
_EMBEDDING = "model.embed_tokens.weight"
_NUM_ROWS, _NUM_COLUMNS = 64, 8
_AKIN = 0.98
"""Least cosine of two samples of one model's tables; 4-bit rounding leaves above 0.99."""

Likeness = Literal["same", "akin", "other"]


class TargetMark(msgspec.Struct, frozen=True):
    """Shape of a target and what its embedding table holds."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    embedding_sha256: str
    """Of the table as the file has it."""
    embedding_sample: str
    """Base64 of float16 [64, 8]: the first columns of rows spread over the table."""


def mark_target(config: ModelConfig, weights: WeightSource) -> TargetMark:
    """Return a target's mark; reads its embedding table once."""
    table = weights.tensor(_EMBEDDING)
    rows = np.linspace(0, config.vocab_size - 1, min(_NUM_ROWS, config.vocab_size), dtype=int)
    shape = (len(rows), config.hidden_size)
    sample = replace(table, shape=shape, raw=np.ascontiguousarray(table.raw[rows]), place=None)
    values = sample.to_float32()[:, :_NUM_COLUMNS].astype("<f2")
    return TargetMark(
        config.num_layers,
        config.hidden_size,
        config.vocab_size,
        sha256(np.ascontiguousarray(table.raw).view(np.uint8).data).hexdigest(),
        base64.b64encode(values.tobytes()).decode(),
    )


def same_shape(mark: TargetMark, config: ModelConfig) -> bool:
    """Return whether a target has the sizes of the marked one."""
    found = (config.num_layers, config.hidden_size, config.vocab_size)
    return found == (mark.num_layers, mark.hidden_size, mark.vocab_size)


def likeness(mark: TargetMark, config: ModelConfig, weights: WeightSource) -> Likeness:
    """Return how near a target is to the marked one: by shape first, then by its table."""
    if not same_shape(mark, config):
        return "other"
    found = mark_target(config, weights)
    if found.embedding_sha256 == mark.embedding_sha256:
        return "same"
    ours, theirs = _sample(mark), _sample(found)
    norm = float(np.linalg.norm(ours) * np.linalg.norm(theirs))
    if ours.shape != theirs.shape or norm == 0.0:
        return "other"
    return "akin" if float(ours @ theirs) >= _AKIN * norm else "other"


def _sample(mark: TargetMark) -> np.ndarray:
    try:
        content = base64.b64decode(mark.embedding_sample, validate=True)
        return np.frombuffer(content, "<f2").astype(np.float64)
    except (binascii.Error, ValueError):
        return np.empty(0)
