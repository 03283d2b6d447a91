"""`twinfire up`: a gateway and pools of prefill and decode workers on this machine, supervised."""

from __future__ import annotations

import argparse
import asyncio
import logging
import secrets
import socket
import sys
import tempfile
import time
import uuid
from pathlib import Path

import msgspec

from twinfire.artifacts.env import Env
from twinfire.artifacts.model_store import ResolvedModel, resolve_model
from twinfire.cli.pull_progress import pull_progress
from twinfire.cli.ready_message import base_url, ready_message
from twinfire.cluster.cluster_file import ClusterFile, read_cluster_file
from twinfire.gateway.listening import bind_socket, run_event_loop
from twinfire.gateway.routing.route import PdPolicy
from twinfire.gateway.settings import GatewaySettings, RequestLimits
from twinfire.protocol.addresses import UnixAddress, parse_address
from twinfire.protocol.errors import TwinfireError
from twinfire.protocol.secret import hash_seed, load_secret
from twinfire.protocol.worker_config import WorkerConfig

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
    parser.add_argument("--pd-policy", choices=PD_POLICIES, help="when a prompt changes hands")
    parser.add_argument(
        "--log-level", choices=["debug", "info", "warning", "error"], default="info"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT. TwinfireError says why it could not start."""
    logging.basicConfig(
        level=args.log_level.upper(), format="%(asctime)s %(name)s %(levelname)s %(message)s"
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    cluster = _with_options(read_cluster_file(args.file) if args.file else ClusterFile(), args)
    with pull_progress(cluster.model.model) as report:
        resolved = resolve_model(cluster.model.model, on_progress=report)
    bound = bind_socket(cluster.gateway.host, cluster.gateway.port)
    run_event_loop(_serve(cluster, resolved, bound))
    return 0


def _with_options(cluster: ClusterFile, args: argparse.Namespace) -> ClusterFile:
    """Return the file's settings with what the command line says instead."""
    said = {"host": args.host, "port": args.port, "pd_policy": args.pd_policy}
    gateway = msgspec.structs.replace(
        cluster.gateway, **{name: value for name, value in said.items() if value is not None}
    )
    model = cluster.model
    if args.model is not None:
        model = msgspec.structs.replace(model, model=args.model)
    return msgspec.structs.replace(cluster, gateway=gateway, model=model)


async def _serve(cluster: ClusterFile, resolved: ResolvedModel, bound: socket.socket) -> None:
    from twinfire.cluster.local_cluster import LocalCluster
    from twinfire.cluster.supervisor import Supervisor
    from twinfire.gateway.app import create_app
    from twinfire.gateway.backends.cluster_backend import ClusterBackend
    from twinfire.gateway.backends.worker_listener import WorkerListener
    from twinfire.gateway.metrics import Metrics
    from twinfire.gateway.routing.router import Router
    from twinfire.gateway.routing.routing_settings import RoutingSettings
    from twinfire.gateway.served_model import ServedModel
    from twinfire.gateway.server import GatewayServer

    started_s = time.monotonic()
    settings = cluster.gateway
    with tempfile.TemporaryDirectory(prefix="twinfire-") as name:
        folder = Path(name)
        secret_file = _secret_file(settings.secret_file, folder)
        secret = load_secret(secret_file)
        loop = asyncio.get_running_loop()
        router = Router(loop.time, RoutingSettings(pd_policy=settings.pd_policy))
        backend = ClusterBackend(resolved.served_name, router, hash_seed(secret))
        listener = WorkerListener(uuid.uuid4().hex, secret, settings.tls)
        listener.add_pool(backend.registry)
        own = await listener.listen(UnixAddress(str(folder / "gateway")))
        if settings.workers:
            joined = await listener.listen(parse_address(settings.workers))
            log.info("workers may join at %s", joined)
        backend.start()
        base = _base_config(cluster, resolved, str(own), secret_file)
        supervisor = Supervisor(cluster.model, base, backend.registry, folder)
        await supervisor.start()
        names = cluster.model.names or (resolved.served_name,)
        model, metrics = ServedModel(names), Metrics(names[0])
        app = create_app(
            _gateway_settings(cluster), backend, model, metrics, LocalCluster(backend, supervisor)
        )
        server = GatewayServer(app, bound)
        failure: list[str] = []

        async def announce() -> None:
            try:
                await model.load_text(resolved.path)
                if model.load_error is not None:
                    raise TwinfireError(model.load_error)
                await supervisor.wait_ready()
            except TwinfireError as error:
                failure.append(str(error))
                server.stop()
                return
            url = base_url(settings.host, server.address[1])
            workers = ", ".join(f"{slot.name} (pid {slot.pid})" for slot in supervisor.slots)
            info = backend.worker_info
            assert info is not None, "every worker had joined"
            took_s = time.monotonic() - started_s
            message = ready_message(names[0], url, info, f"Workers: {workers}. ", took_s)
            print(message, file=sys.stderr, flush=True)

        announcing = asyncio.create_task(announce())
        try:
            await server.serve(handle_signals=True)
        finally:
            announcing.cancel()
            await supervisor.stop()
            await listener.close()
            await backend.close()
        if failure:
            raise TwinfireError(failure[0])


def _secret_file(given: str | None, folder: Path) -> str:
    """Return the file of the cluster's secret, a new one where none is given."""
    if given is not None:
        return given
    path = folder / "secret"
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32) + "\n")
    return str(path)


def _base_config(
    cluster: ClusterFile, resolved: ResolvedModel, gateway: str, secret_file: str
) -> WorkerConfig:
    model = cluster.model
    return WorkerConfig(
        model_path=str(resolved.path),
        served_name=resolved.served_name,
        socket_path="",
        join=(gateway,),
        secret_file=secret_file,
        tls=cluster.gateway.tls,
        dtype=model.dtype,
        quantization=model.quantization,
        kv_cache_dtype=model.kv_cache_dtype,
        max_model_len=model.max_model_len,
        connector=model.connector,
        weight_cache_dir=str(Env.read().cache_dir / "packed-weights"),
    )


def _gateway_settings(cluster: ClusterFile) -> GatewaySettings:
    limits = RequestLimits(max_request_s=cluster.gateway.max_gateway_wait_s)
    return GatewaySettings(api_keys=cluster.gateway.api_keys, limits=limits)
