"""Prompts go to workers in two lanes, each with a bound of its own.

A prompt is short for a worker that computes in one step what it neither holds nor pulls. Workers
let short prompts pass long ones, so they must get them while they have long ones to compute; and a
bound for all together would let either kind keep the other out.
"""

from __future__ import annotations

from typing import Literal

Lane = Literal["short", "long"]
