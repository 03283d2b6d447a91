"""The cluster file's stanza for a model that other engines serve.

[[model]]
names = ["qwen"]
external = { engine = "vllm", prefill = ["http://p0:8000"], decode = ["http://d0:8000"] }
"""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

import msgspec

from twinfire.protocol.errors import InvalidRequest

EngineKind = Literal["vllm", "sglang"]
EngineStage = Literal["prefill", "decode", "mixed"]
DEFAULT_BOOTSTRAP_PORT = 8998
"""Where an SGLang prefill server lets decode servers find it, unless it was told otherwise."""


class ExternalTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The engines of one model by URL, and how they are looked after. Times in seconds."""

    engine: EngineKind
    prefill: tuple[str, ...] = ()
    """Engines that compute prompts for those in `decode`; both or neither."""
    decode: tuple[str, ...] = ()
    mixed: tuple[str, ...] = ()
    """Engines that do both stages, in place of the two pools."""
    bootstrap_ports: tuple[int, ...] = ()
    """SGLang only, one for each of `prefill`; empty takes the engine's default."""
    engine_model: str | None = None
    """What the engines call the model; None takes the first of its public names."""
    api_key_file: str | None = None
    """The key that is sent to the engines; a client's own never is."""
    health_interval_s: float = 2.0
    connect_timeout_s: float = 3.0
    silence_timeout_s: float = 600.0
    """An engine that sends nothing for so long has failed."""
    max_attempts: int = 3
    """Engines that one request may try before the client gets its first byte."""

    def pools(self) -> tuple[tuple[EngineStage, tuple[str, ...]], ...]:
        """Return each stage with its engines' URLs."""
        return (("prefill", self.prefill), ("decode", self.decode), ("mixed", self.mixed))


def check_external_table(table: ExternalTable, where: str = "external") -> None:
    """Raise InvalidRequest, naming the field, when the stanza cannot work."""
    if table.mixed and (table.prefill or table.decode):
        raise InvalidRequest(
            f"{where}.mixed: engines that do both stages go without `prefill` and `decode`"
        )
    if not table.mixed and not (table.prefill and table.decode):
        raise InvalidRequest(
            f"{where} needs URLs in `mixed`, or in both `prefill` and `decode` "
            f"({len(table.prefill)} and {len(table.decode)} are given)"
        )
    seen: set[str] = set()
    for stage, urls in table.pools():
        for number, url in enumerate(urls):
            _check_url(url, f"{where}.{stage}[{number}]")
            if url.rstrip("/") in seen:
                raise InvalidRequest(f"{where}.{stage}[{number}]: `{url}` is there already")
            seen.add(url.rstrip("/"))
    _check_bootstrap_ports(table, where)
    for name in ("health_interval_s", "connect_timeout_s", "silence_timeout_s"):
        if getattr(table, name) <= 0:
            raise InvalidRequest(f"{where}.{name} is {getattr(table, name)}; it must be above 0")
    if table.max_attempts < 1:
        raise InvalidRequest(f"{where}.max_attempts is {table.max_attempts}; 1 is the least")


def _check_url(url: str, where: str) -> None:
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - raises for one that is no port
    except ValueError as error:
        raise InvalidRequest(f"{where}: `{url}` is not a URL: {error}") from None
    if parts.username or parts.password:
        raise InvalidRequest(f"{where}: a URL would show its key; give `api_key_file` instead")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidRequest(f"{where}: `{url}` is not an http(s) URL")
    if parts.path.strip("/") or parts.query or parts.fragment:
        raise InvalidRequest(f"{where}: `{url}` has more than a host and a port")


def _check_bootstrap_ports(table: ExternalTable, where: str) -> None:
    ports = table.bootstrap_ports
    if ports and table.engine != "sglang":
        raise InvalidRequest(f"{where}.bootstrap_ports are SGLang's, not {table.engine}'s")
    if ports and len(ports) != len(table.prefill):
        raise InvalidRequest(
            f"{where}.bootstrap_ports has {len(ports)} ports for "
            f"{len(table.prefill)} prefill servers"
        )
