"""`twinfire up`: a gateway and pools of prefill and decode workers on this machine, supervised."""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from twinfire.accounts.prices import price_table, read_price_file
from twinfire.artifacts.env import Env
from twinfire.artifacts.model_store import ResolvedModel, resolve_model
from twinfire.cli.access_options import AccessOptions, access_options, add_access_arguments
from twinfire.cli.alias_option import add_alias_argument, parse_aliases
from twinfire.cli.pull_progress import pull_progress
from twinfire.cli.ready_message import base_url, ready_message
from twinfire.cli.speculate_option import add_speculate_argument
from twinfire.cli.tracing_option import add_tracing_argument, checked_endpoint
from twinfire.cluster.cluster_file import ClusterFile, ModelTable, read_cluster_file
from twinfire.gateway.listening import bind_socket, run_event_loop
from twinfire.gateway.routing.route import PdPolicy
from twinfire.gateway.settings import GatewaySettings, RequestLimits
from twinfire.protocol.addresses import UnixAddress, parse_address
from twinfire.protocol.errors import InvalidRequest, TwinfireError
from twinfire.protocol.key_file import load_key
from twinfire.protocol.secret import ensure_secret, hash_seed, load_secret
from twinfire.protocol.worker_config import WorkerConfig

if TYPE_CHECKING:
    from twinfire.cluster.model_pools import ModelPools
    from twinfire.gateway.external.external_models import ExternalModels
    from twinfire.gateway.external.external_pool import ExternalPool

PD_POLICIES: tuple[PdPolicy, ...] = ("auto", "always", "never")

log = logging.getLogger(__name__)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    parser = subparsers.add_parser(
        "up",
        help="serve a model by pools of prefill and decode workers",
        description="Start a gateway and its workers on this machine and keep them running. "
        "Without a file: the default model, one prefill and one decode worker of one core each.",
    )
    parser.add_argument("file", nargs="?", type=Path, metavar="CLUSTER.TOML")
    parser.add_argument("--model", help="a model folder, a .gguf file or an alias")
    parser.add_argument("--host", help="address to listen on")
    parser.add_argument("--port", type=int, help="TCP port, 0 for any")
    add_alias_argument(parser)
    add_speculate_argument(parser, default=None)
    parser.add_argument("--pd-policy", choices=PD_POLICIES, help="when a prompt changes hands")
    add_access_arguments(parser)
    add_tracing_argument(parser)
    parser.add_argument(
        "--log-level", choices=["debug", "info", "warning", "error"], default="info"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT. TwinfireError says why it could not start."""
    logging.basicConfig(
        level=args.log_level.upper(), format="%(asctime)s %(name)s %(levelname)s %(message)s"
    )
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    cluster = _with_options(read_cluster_file(args.file) if args.file else ClusterFile(), args)
    resolved = []
    for table in cluster.models:
        with pull_progress(table.model) as report:
            resolved.append(resolve_model(table.model, on_progress=report))
    _check_distinct(resolved)
    settings = _gateway_settings(cluster, access_options(args))
    bound = bind_socket(cluster.gateway.host, cluster.gateway.port)
    run_event_loop(_serve(cluster, settings, resolved, bound))
    return 0


def _with_options(cluster: ClusterFile, args: argparse.Namespace) -> ClusterFile:
    """Return the file's settings with what the command line says instead."""
    said = {
        "host": args.host,
        "port": args.port,
        "pd_policy": args.pd_policy,
        "otlp_endpoint": args.otlp_endpoint,
    }
    gateway = msgspec.structs.replace(
        cluster.gateway,
        aliases={**cluster.gateway.aliases, **parse_aliases(args.alias)},
        **{name: value for name, value in said.items() if value is not None},
    )
    model = cluster.model
    if args.model is not None:
        if not isinstance(model, ModelTable):
            raise InvalidRequest("--model goes with one model; the file has a list of them")
        model = msgspec.structs.replace(model, model=args.model)
    if args.speculate is not None:
        model = _speculating(model, args.speculate)
    return msgspec.structs.replace(cluster, gateway=gateway, model=model)


def _speculating(
    model: ModelTable | tuple[ModelTable, ...], speculate: str
) -> ModelTable | tuple[ModelTable, ...]:
    """Tell every model of our own workers; other engines are told by those who start them."""
    if isinstance(model, ModelTable):
        return msgspec.structs.replace(model, speculate=speculate)
    return tuple(
        msgspec.structs.replace(one, speculate=speculate) if one.external is None else one
        for one in model
    )


def _check_distinct(resolved: Sequence[ResolvedModel]) -> None:
    """Refuse models whose workers could not be told apart."""
    names = [model.served_name for model in resolved]
    if len(set(names)) < len(names):
        raise InvalidRequest(f"two of the models are the same one: {', '.join(names)}")


async def _serve(
    cluster: ClusterFile,
    gateway_settings: GatewaySettings,
    resolved: Sequence[ResolvedModel],
    bound: socket.socket,
) -> None:
    from twinfire.cluster.local_cluster import LocalCluster
    from twinfire.cluster.model_pools import ModelPools, Surroundings
    from twinfire.cluster.supervisor import kv_share_bytes
    from twinfire.gateway.app import create_app_of_models
    from twinfire.gateway.backends.worker_listener import WorkerListener
    from twinfire.gateway.server import GatewayServer

    started_s = time.monotonic()
    settings = cluster.gateway
    external = _external_models(cluster)
    with tempfile.TemporaryDirectory(prefix="twinfire-") as name:
        folder = Path(name)
        secret_file = settings.secret_file or str(folder / "secret")
        secret = load_secret(secret_file) if settings.secret_file else ensure_secret(secret_file)
        listener = WorkerListener(uuid.uuid4().hex, secret, settings.tls)
        own = await listener.listen(UnixAddress(str(folder / "gateway")))
        around = Surroundings(
            routing=cluster.routing,
            hash_seed=hash_seed(secret),
            base=_base_config(cluster, str(own), secret_file),
            folder=folder,
            kv_share_bytes=kv_share_bytes(cluster.models),
        )
        pools = [
            ModelPools(table, model, around, number if len(resolved) > 1 else None)
            for number, (table, model) in enumerate(zip(cluster.models, resolved, strict=True))
        ]
        for one in pools:
            listener.add_pool(one.backend.registry)
        if settings.workers:
            joined = await listener.listen(parse_address(settings.workers))
            log.info("workers may join at %s", joined)
        hosted = [one.hosted for one in pools]
        control = LocalCluster(pools, external)
        app = create_app_of_models(gateway_settings, hosted, control, external)
        server = GatewayServer(app, bound)
        failure: list[str] = []

        async def announce() -> None:
            try:
                await asyncio.gather(*(one.wait_ready() for one in pools))
            except TwinfireError as error:
                failure.append(str(error))
                server.stop()
                return
            is_tls = gateway_settings.tls is not None
            url = base_url(settings.host, server.address[1], is_tls=is_tls)
            for one in pools:
                print(_ready_line(one, url, started_s), file=sys.stderr, flush=True)
            for pool in external.pools:
                print(_external_line(pool, url), file=sys.stderr, flush=True)

        await external.start()
        for one in pools:
            await one.start()
        announcing = asyncio.create_task(announce())
        try:
            await server.serve(handle_signals=True)
        finally:
            announcing.cancel()
            await asyncio.gather(*(one.supervisor.stop() for one in pools))
            await listener.close()
            await asyncio.gather(*(one.backend.close() for one in pools))
            await external.close()
        if failure:
            raise TwinfireError(failure[0])


def _ready_line(pools: ModelPools, url: str, started_s: float) -> str:
    info = pools.backend.worker_info
    if info is None:
        return f"{pools.names[0]} waits at {url} for workers to join."
    slots = pools.supervisor.slots
    workers = ", ".join(f"{slot.name} (pid {slot.pid})" for slot in slots) or "others' only"
    took_s = time.monotonic() - started_s
    return ready_message(pools.names[0], url, info, f"Workers: {workers}. ", took_s)


def _external_line(pool: ExternalPool, url: str) -> str:
    states = [server.state for server in pool.servers]
    reason = pool.unready_reason
    state = "is ready" if reason is None else f"waits ({reason})"
    return (
        f"{pool.names[0]} {state} at {url}; "
        f"{states.count('ready')} of {len(states)} {pool.engine} engines are healthy."
    )


def _external_models(cluster: ClusterFile) -> ExternalModels:
    from twinfire.gateway.external.external_models import ExternalModels

    if not cluster.external_models:
        return ExternalModels()
    # Costs an HTTP client, which no other cluster needs.
    from twinfire.gateway.external.external_pool import ExternalPool

    return ExternalModels([ExternalPool(names, table) for names, table in cluster.external_models])


def _base_config(cluster: ClusterFile, gateway: str, secret_file: str) -> WorkerConfig:
    return WorkerConfig(
        model_path="",
        served_name="",
        socket_path="",
        join=(gateway,),
        secret_file=secret_file,
        tls=cluster.gateway.tls,
        weight_cache_dir=str(Env.read().cache_dir / "packed-weights"),
    )


def _gateway_settings(cluster: ClusterFile, said: AccessOptions) -> GatewaySettings:
    gateway = cluster.gateway
    cert, key = gateway.tls_cert, gateway.tls_key
    access = AccessOptions(
        accounts_db=said.accounts_db or gateway.accounts_db,
        is_open=said.is_open or (gateway.open and not said.needs_token),
        needs_token=said.needs_token or (gateway.require_token and not said.is_open),
        tls_cert=said.tls_cert or (Path(cert) if cert else None),
        tls_key=said.tls_key or (Path(key) if key else None),
    )
    prices = price_table(gateway.currency, cluster.prices, "the cluster file")
    if said.prices is not None:
        prices = read_price_file(said.prices)
    admin_key = None
    if gateway.admin_key_file is not None:
        admin_key = load_key(gateway.admin_key_file, "the administrator's key")
    return GatewaySettings(
        aliases=gateway.aliases,
        workers_ai_streams=gateway.workers_ai_streams,
        api_keys=gateway.api_keys,
        access=access.mode(gateway.host),
        prices=prices,
        database=access.database,
        tls=access.tls,
        admin_key=admin_key,
        otlp_endpoint=checked_endpoint(gateway.otlp_endpoint),
        drain_timeout_s=gateway.drain_timeout_s,
        limits=RequestLimits(max_request_s=gateway.max_gateway_wait_s),
    )
