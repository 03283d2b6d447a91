"""How the hidden states of a prompt's tokens become one vector."""

from __future__ import annotations

from typing import Literal

Pooling = Literal["last", "mean"]
"""That of the last token, or the mean over all."""
