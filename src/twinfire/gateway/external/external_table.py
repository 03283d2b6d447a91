"""The cluster file's stanza for a model that other engines serve.

[[model]]
external = "vllm"
names = ["qwen"]
prefill = ["http://p0:8000"]
decode = ["http://d0:8000", "http://d1:8000"]
"""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

import msgspec

from twinfire.protocol.errors import InvalidRequest

EngineKind = Literal["vllm", "sglang"]
DEFAULT_BOOTSTRAP_PORT = 8998
"""Where an SGLang prefill server lets decode servers find it, unless it was told otherwise."""


class ExternalTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model, its engines by URL, and how they are looked after. Times in seconds."""

    external: EngineKind
    names: tuple[str, ...]
    """Public names; the first goes to the engines unless `engine_model` says otherwise."""
    decode: tuple[str, ...]
    prefill: tuple[str, ...] = ()
    """Empty: each engine in `decode` does both stages."""
    bootstrap_ports: tuple[int, ...] = ()
    """SGLang only, one for each of `prefill`; empty takes the engine's default."""
    engine_model: str | None = None
    api_key: str | None = None
    """Sent to the engines; a client's own key never is."""
    health_interval_s: float = 2.0
    connect_timeout_s: float = 3.0
    silence_timeout_s: float = 600.0
    """An engine that sends nothing for so long has failed."""
    max_attempts: int = 3
    """Engines that one request may try before the client gets its first byte."""


def check_external_table(table: ExternalTable) -> None:
    """Raise InvalidRequest, naming the field, when the stanza cannot work."""
    if not table.names:
        raise InvalidRequest("an external model needs `names`", "names")
    if not table.decode:
        raise InvalidRequest("an external model needs at least one URL in `decode`", "decode")
    for url in (*table.prefill, *table.decode):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidRequest(f"`{url}` is not an http(s) URL", "decode")
    if table.bootstrap_ports and len(table.bootstrap_ports) != len(table.prefill):
        raise InvalidRequest(
            f"`bootstrap_ports` has {len(table.bootstrap_ports)} ports for "
            f"{len(table.prefill)} prefill servers",
            "bootstrap_ports",
        )
    if table.max_attempts < 1:
        raise InvalidRequest("`max_attempts` must be at least 1", "max_attempts")
