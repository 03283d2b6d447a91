"""Counter-based randomness: noise of (seed, choice, position, token id) and of nothing else.

A drawn token is then the same alone, in any batch, after preemption and on another worker. The
mixer is splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014) for
the key, and two rounds of the 32-bit finaliser of MurmurHash3 for each token id. Owns no state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_MASK64 = (1 << 64) - 1
_GOLDEN64 = 0x9E3779B97F4A7C15
_GOLDEN32 = np.uint32(0x9E3779B9)
_MURMUR_A = np.uint32(0x85EBCA6B)
_MURMUR_B = np.uint32(0xC2B2AE35)
_STEPS = float(1 << 32)


@dataclass(frozen=True, slots=True)
class NoiseKey:
    """The noise of one draw; `low` and `high` are 32-bit halves of the mixed counter."""

    low: int
    high: int


def noise_key(seed: int, choice: int, position: int) -> NoiseKey:
    """Return the key of the token of `choice` at `position` (counted from the prompt's start)."""
    state = _splitmix64(seed & _MASK64)
    state = _splitmix64(state ^ choice)
    state = _splitmix64(state ^ position)
    return NoiseKey(low=state & 0xFFFFFFFF, high=state >> 32)


def noise_bits(key: NoiseKey, token_ids: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Return 32 uniform bits for each token id."""
    bits = token_ids * _GOLDEN32
    bits ^= np.uint32(key.low)
    _finalise(bits)
    bits ^= np.uint32(key.high)
    _finalise(bits)
    return bits


def gumbel(bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.float64]:
    """Return standard Gumbel noise, -log(-log u) with u = (bits + 1/2) / 2**32."""
    uniform = (bits.astype(np.float64) + 0.5) / _STEPS
    return -np.log(-np.log(uniform))


def bits_reaching(noise: float) -> int:
    """Return the least bits whose Gumbel noise may reach `noise`; 2**32 or more if none does."""
    uniform = math.exp(-math.exp(min(-noise, 700.0)))
    return max(0, math.floor(uniform * _STEPS - 0.5) - 1)


def _finalise(bits: npt.NDArray[np.uint32]) -> None:
    bits ^= bits >> np.uint32(16)
    bits *= _MURMUR_A
    bits ^= bits >> np.uint32(13)
    bits *= _MURMUR_B
    bits ^= bits >> np.uint32(16)


def _splitmix64(state: int) -> int:
    state = (state + _GOLDEN64) & _MASK64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
    return state ^ (state >> 31)
