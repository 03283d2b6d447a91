"""Whether a server takes requests that name nobody."""

from __future__ import annotations

from typing import Literal

AccessMode = Literal["auto", "open", "tokens"]
"""Auto is open as long as there is neither a key nor a token."""
