"""What `twinfire up` is to run, read from a TOML file; every field has a default.

[gateway]
port = 8000
pd_policy = "auto"

[model]
model = "smollm2-135m"
prefill = { count = 1, threads = 1 }
decode = { count = 1, threads = 1 }

Several models behind the gateway are several tables `[[model]]`. One that other engines serve:

[[model]]
names = ["qwen"]
external = { engine = "vllm", mixed = ["http://10.0.0.7:8000"] }
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from twinfire.accounts.prices import ModelPrice, price_table
from twinfire.gateway.external.external_table import ExternalTable, check_external_table
from twinfire.gateway.routing.route import PdPolicy
from twinfire.gateway.routing.routing_settings import RoutingSettings
from twinfire.gateway.settings import WorkersAiStreams
from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.messages import Role
from twinfire.protocol.speculation import parse_speculation
from twinfire.protocol.worker_config import (
    ConnectorKind,
    Dtype,
    KvCacheDtype,
    Quantization,
    TlsFiles,
    parse_device,
)

_OF_EXTERNAL_MODELS = ("names", "external")


class GatewayTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The gateway and its links."""

    host: str = "127.0.0.1"
    port: int = 8000
    workers: str = ""
    """Where hand-started workers may join (`tcp:host:port`); empty takes only our own."""
    secret_file: str | None = None
    """The cluster's secret; None makes one for this cluster's life."""
    tls: TlsFiles | None = None
    pd_policy: PdPolicy = "auto"
    api_keys: tuple[str, ...] = ()
    aliases: dict[str, str] = {}
    """More names of models (table `[gateway.aliases]`), each with the model's own."""
    workers_ai_streams: WorkersAiStreams = "auto"
    """How streams of `/ai/run` look; `auto` goes by the model's name."""
    admin_key_file: str | None = None
    """The key that opens `/cluster/` to every host; None leaves it to this one."""
    max_gateway_wait_s: float = 600.0
    """How long a request may take in all, unless it says so itself."""
    accounts_db: str | None = None
    """File or URL of accounts and usage; None is the user's own, `none` keeps nothing."""
    currency: str = "USD"
    """Of the prices in this file."""
    open: bool = False
    """Whether requests without a token are served from other hosts too."""
    require_token: bool = False
    tls_cert: str | None = None
    """PEM of the certificate chain that clients see; None serves plain HTTP."""
    tls_key: str | None = None
    otlp_endpoint: str | None = None
    """URL of the OpenTelemetry collector that gets traces of requests; None makes none."""
    drain_timeout_s: float = 30.0
    """How long running requests may go on after SIGTERM."""
    routing: RoutingSettings = RoutingSettings()
    """All but `pd_policy`, which stands above."""


class PoolTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Workers of one role. None leaves the choice to the program."""

    count: int = 0
    threads: int | None = None
    use_idle_cores: bool = True
    """Whether a worker of few threads also computes on cores that nobody uses at the moment."""
    niceness: int = 0
    """Added to the process's own; positive gives way to others."""
    kv_cache_memory: int | None = None
    """Bytes for each worker."""
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    max_prompt_tokens_beside_streams: int | None = None
    """What a prompt may take of a step while streams run on the worker."""


class ModelTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model and its pools."""

    model: str = "smollm2-135m"
    """A folder, a .gguf file or an alias."""
    names: tuple[str, ...] = ()
    """Public names; empty takes the alias or the folder's name."""
    dtype: Dtype = "auto"
    quantization: Quantization = "auto"
    kv_cache_dtype: KvCacheDtype = "auto"
    speculate: str = "off"
    """How every worker guesses tokens ahead, as after `--speculate`."""
    device: str = "cpu"
    """cpu, cuda or cuda:N: what every worker computes on."""
    max_model_len: int | None = None
    tool_parser: str = "auto"
    """How tool calls are read: a form's name, `auto` or `none`."""
    reasoning_parser: str = "auto"
    connector: ConnectorKind = "socket"
    prefill: PoolTable = PoolTable(count=1, threads=1, niceness=5)
    decode: PoolTable = PoolTable(count=1, threads=1)
    mixed: PoolTable = PoolTable()
    external: ExternalTable | None = None
    """Other engines that serve the model: it then has names and nothing else of the above."""

    def pools(self) -> Iterator[tuple[Role, PoolTable]]:
        """Yield each role with its pool."""
        yield "prefill", self.prefill
        yield "decode", self.decode
        yield "mixed", self.mixed


class ClusterFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of the file."""

    gateway: GatewayTable = GatewayTable()
    prices: dict[str, ModelPrice] = {}
    """What models cost, by public name; `*` is all others."""
    model: ModelTable | tuple[ModelTable, ...] = ModelTable()

    @property
    def models(self) -> tuple[ModelTable, ...]:
        """Every model of our own workers, in order."""
        return tuple(table for table in self.tables if table.external is None)

    @property
    def external_models(self) -> tuple[tuple[tuple[str, ...], ExternalTable], ...]:
        """The names and engines of every other model, in order."""
        tables = self.tables
        return tuple((one.names, one.external) for one in tables if one.external is not None)

    @property
    def routing(self) -> RoutingSettings:
        """How requests are given to workers."""
        gateway = self.gateway
        return msgspec.structs.replace(gateway.routing, pd_policy=gateway.pd_policy)

    @property
    def tables(self) -> tuple[ModelTable, ...]:
        """Every model, in order."""
        return (self.model,) if isinstance(self.model, ModelTable) else self.model


_TABLES: tuple[type[msgspec.Struct], ...] = (
    *(GatewayTable, PoolTable, ModelTable, ClusterFile),
    *(TlsFiles, ExternalTable, RoutingSettings),
)


def read_cluster_file(path: Path) -> ClusterFile:
    """Return the file's settings; InvalidRequest names the field that is wrong."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequest(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} is not TOML: {error}") from None
    try:
        cluster = msgspec.convert(table, ClusterFile)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{path}: {error}{_nearest_field(str(error))}") from None
    price_table(cluster.gateway.currency, cluster.prices, str(path))
    _check(cluster, table, path)
    return cluster


def _check(cluster: ClusterFile, given: dict[str, Any], path: Path) -> None:
    """`given` is the file as it was read, without what it leaves to the defaults."""
    if "pd_policy" in given.get("gateway", {}).get("routing", {}):
        raise InvalidRequest(f"{path}: gateway.routing.pd_policy: write it as gateway.pd_policy")
    if cluster.gateway.drain_timeout_s < 0:
        raise InvalidRequest(f"{path}: gateway.drain_timeout_s must not be below 0")
    tables = cluster.tables
    if not tables:
        raise InvalidRequest(f"{path}: there is no model")
    models = given.get("model", {})
    fields = models if isinstance(models, list) else [models]
    for number, (table, named) in enumerate(zip(tables, fields, strict=True)):
        where = f"{path}: " + ("model" if len(tables) == 1 else f"model[{number}]")
        if table.external is None:
            _check_pools(table, where, takes_others=bool(cluster.gateway.workers))
        else:
            _check_external(table.names, table.external, named, where)


def _check_external(
    names: Sequence[str], external: ExternalTable, given: Iterable[str], where: str
) -> None:
    if not names:
        raise InvalidRequest(f"{where}.names: an external model needs at least one name")
    foreign = [name for name in given if name not in _OF_EXTERNAL_MODELS]
    if foreign:
        raise InvalidRequest(
            f"{where}.{foreign[0]}: a model with `external` has no workers of its own; "
            "it has `names` only"
        )
    check_external_table(external, f"{where}.external")


def _check_pools(model: ModelTable, where: str, *, takes_others: bool) -> None:
    try:
        parse_speculation(model.speculate)
    except InvalidRequest as fault:
        raise InvalidRequest(f"{where}.{fault}") from None
    try:
        parse_device(model.device)
    except ValueError as fault:
        raise InvalidRequest(f"{where}.{fault}") from None
    for role, pool in model.pools():
        if pool.count < 0:
            raise InvalidRequest(f"{where}.{role}.count is {pool.count}; 0 is the least")
    if not model.decode.count and not model.mixed.count and not takes_others:
        raise InvalidRequest(
            f"{where}.decode.count and mixed.count are 0 and gateway.workers is empty, "
            "so that nobody could decode"
        )


def _nearest_field(message: str) -> str:
    """Return a hint for a field that nobody knows."""
    _, found, rest = message.partition("unknown field `")
    if not found:
        return ""
    known = {name for table in _TABLES for name in table.__struct_fields__}
    nearest = difflib.get_close_matches(rest.partition("`")[0], known, n=1)
    return f"; did you mean `{nearest[0]}`?" if nearest else ""
