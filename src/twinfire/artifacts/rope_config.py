"""Rotary-embedding settings from either file family.

Owns the reading of `rope_parameters` (newer files), `rope_theta` with `rope_scaling` (older ones)
and the GGUF keys. A kind of scaling that Twinfire does not compute is refused, never ignored.
Formulas of llama3 and yarn: the Llama 3.1 model card and arXiv 2309.00071.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import numpy as np
import numpy.typing as npt

from twinfire.artifacts.fields import Fields
from twinfire.artifacts.model_config import RopeConfig, RopeKind

DEFAULT_THETA = 10_000.0
LLAMA3_LOW_FREQ_FACTOR = 1.0
LLAMA3_HIGH_FREQ_FACTOR = 4.0
LLAMA3_ORIGINAL_MAX_POSITION = 8192
SUPPORTED_KINDS: tuple[str, ...] = get_args(RopeKind)


def rope_from_config(config: Fields, max_position: int) -> RopeConfig:
    """Return the rope of a `config.json`; ModelError naming an unsupported kind or bad field."""
    scaling = config.nested("rope_parameters") or config.nested("rope_scaling")
    theta = config.number("rope_theta", DEFAULT_THETA, above=0.0)
    if scaling is None:
        _refuse_partial(config)
        return RopeConfig(theta=theta)
    if any(isinstance(scaling.raw(name), dict) for name in scaling):
        raise config.fault("rope_parameters", "differs between layer types, which is not supported")
    theta = scaling.number("rope_theta", theta, above=0.0)
    for fields in (config, scaling):
        _refuse_partial(fields)
    kind = scaling.optional_text("rope_type") or scaling.optional_text("type") or "default"
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=scaling.number("factor", above=0.0))
    # Some files keep the trained window beside the scaling, and then it is the one that holds.
    original = config.optional_integer("original_max_position_embeddings", 1)
    if original is None:
        original = scaling.integer("original_max_position_embeddings", max_position)
    if kind == "llama3":
        return _llama3(scaling, theta, original)
    if kind == "yarn":
        return _yarn(scaling, theta, original, max_position)
    raise scaling.fault("rope_type", f"is '{kind}'; supported are {', '.join(SUPPORTED_KINDS)}")


def _llama3(scaling: Fields, theta: float, original: int) -> RopeConfig:
    low = scaling.number("low_freq_factor", above=0.0)
    high = scaling.number("high_freq_factor", above=0.0)
    if high <= low:
        raise scaling.fault("high_freq_factor", f"is {high}, must be above low_freq_factor {low}")
    return RopeConfig(
        theta=theta,
        kind="llama3",
        factor=scaling.number("factor", above=0.0),
        original_max_position=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(scaling: Fields, theta: float, original: int, max_position: int) -> RopeConfig:
    if not scaling.flag("truncate", default=True):
        raise scaling.fault("truncate", "is false, which is not supported")
    factor = scaling.number("factor", max_position / original, above=0.0)
    attention_factor = scaling.optional_number("attention_factor")
    if attention_factor is None:
        mscale = scaling.optional_number("mscale")
        mscale_all_dim = scaling.optional_number("mscale_all_dim")
        attention_factor = yarn_mscale(factor)
        if mscale and mscale_all_dim:
            attention_factor = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=scaling.number("beta_fast", 32.0, above=0.0),
        beta_slow=scaling.number("beta_slow", 1.0, above=0.0),
        attention_factor=attention_factor,
    )


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """Return yarn's correction of attention temperature (arXiv 2309.00071, eq. 22)."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def _refuse_partial(fields: Fields) -> None:
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise fields.fault("partial_rotary_factor", "must be 1; partial rotation is not supported")


def rope_from_gguf(
    metadata: Fields,
    architecture: str,
    head_dim: int,
    freq_factors: npt.NDArray[np.float32] | None,
) -> RopeConfig:
    """Return the rope of a GGUF; `freq_factors` [head_dim / 2] is its rope_freqs tensor."""
    prefix = f"{architecture}.rope"
    rotated = metadata.integer(f"{prefix}.dimension_count", head_dim)
    if rotated != head_dim:
        raise metadata.fault(
            f"{prefix}.dimension_count",
            f"is {rotated}, must be the head's {head_dim}; partial rotation is not supported",
        )
    theta = metadata.number(f"{prefix}.freq_base", DEFAULT_THETA, above=0.0)
    kind = metadata.optional_text(f"{prefix}.scaling.type") or "none"
    factor_name = f"{prefix}.scaling.factor"
    if kind == "none" and freq_factors is not None:
        return _llama3_from_factors(metadata, freq_factors, RopeConfig(theta=theta), head_dim)
    if freq_factors is not None:
        raise metadata.fault(f"{prefix}.scaling.type", f"is '{kind}' beside a rope_freqs tensor")
    if kind == "none":
        return RopeConfig(theta=theta)
    if kind == "linear":
        factor = metadata.number(factor_name, 1.0, above=0.0)
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    if kind == "yarn":
        factor = metadata.number(factor_name, above=0.0)
        attention_factor = metadata.number(f"{prefix}.scaling.attn_factor", 1.0, above=0.0)
        return RopeConfig(
            theta=theta,
            kind="yarn",
            factor=factor,
            original_max_position=metadata.integer(f"{prefix}.scaling.original_context_length"),
            beta_fast=metadata.number(f"{prefix}.scaling.yarn_beta_fast", 32.0, above=0.0),
            beta_slow=metadata.number(f"{prefix}.scaling.yarn_beta_slow", 1.0, above=0.0),
            attention_factor=attention_factor * yarn_mscale(factor),
        )
    raise metadata.fault(f"{prefix}.scaling.type", f"is '{kind}'; supported are none, linear, yarn")


def _llama3_from_factors(
    metadata: Fields, freq_factors: npt.NDArray[np.float32], plain: RopeConfig, head_dim: int
) -> RopeConfig:
    """Recover Llama 3's settings from the factors that the converter computed of them.

    Every published Llama 3 uses the same low and high factor and trained window; other values
    cannot be told from the tensor reliably and are refused.
    """
    if freq_factors.size == head_dim // 2 and np.all(freq_factors == 1.0):
        return plain
    guess = replace(
        plain,
        kind="llama3",
        factor=float(freq_factors.max()),
        original_max_position=LLAMA3_ORIGINAL_MAX_POSITION,
        low_freq_factor=LLAMA3_LOW_FREQ_FACTOR,
        high_freq_factor=LLAMA3_HIGH_FREQ_FACTOR,
    )
    expected = llama3_freq_factors(guess, head_dim)
    if freq_factors.shape != expected.shape or not np.allclose(freq_factors, expected, rtol=1e-3):
        raise metadata.fault(
            "rope_freqs.weight", "is not Llama 3's rope scaling; no other is supported"
        )
    return guess


def llama3_freq_factors(rope: RopeConfig, head_dim: int) -> npt.NDArray[np.float64]:
    """Return what each inverse frequency is divided by, [head_dim / 2]."""
    inverse_freqs = rope.theta ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = rope.original_max_position * inverse_freqs / (2 * math.pi)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - kept) / rope.factor + kept)
