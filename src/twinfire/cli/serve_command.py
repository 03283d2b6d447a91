"""`twinfire serve`: a gateway and one worker, as two processes.

Binds the port first, so that a taken one is told at once, and starts the worker before it imports
the gateway's own libraries, so that both load at the same time.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
import sys

from twinfire.accounts.prices import PriceTable, read_price_file
from twinfire.artifacts.model_store import ResolvedModel, resolve_model
from twinfire.cli.load_progress import LoadProgressBar
from twinfire.cli.memory_message import memory_message
from twinfire.cli.pull_progress import pull_progress
from twinfire.cli.ready_message import base_url, ready_message
from twinfire.cli.serve_options import ServeOptions, add_serve_arguments, serve_options
from twinfire.gateway.backends.local_worker import LocalWorker
from twinfire.gateway.listening import bind_socket, run_event_loop
from twinfire.gateway.settings import GatewaySettings, RequestLimits
from twinfire.protocol.errors import TwinfireError
from twinfire.protocol.startup_stages import StartupStages, process_age_s
from twinfire.protocol.worker_config import WorkerConfig


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serve one model: a gateway and one worker, as two processes.",
    )
    add_serve_arguments(parser)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT. TwinfireError says why it could not start."""
    stages = StartupStages()
    stages.begin("command")
    options = serve_options(args)
    logging.basicConfig(
        level=options.log_level.upper(), format="%(asctime)s %(name)s %(levelname)s %(message)s"
    )
    # Its own notices of start and end say nothing that ours do not.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    with pull_progress(options.model) as report:
        resolved = resolve_model(options.model, on_progress=report)
    settings = _gateway_settings(options)
    bound = bind_socket(options.host, options.port)
    run_event_loop(_serve(options, settings, resolved, bound, stages))
    return 0


async def _serve(
    options: ServeOptions,
    settings: GatewaySettings,
    resolved: ResolvedModel,
    bound: socket.socket,
    stages: StartupStages,
) -> None:
    progress = LoadProgressBar()
    worker = LocalWorker(_worker_config(options, resolved), on_state=progress.update)
    await worker.start()
    stages.begin("gateway imports")
    # Imported while the worker imports its own.
    from twinfire.gateway.app import create_app
    from twinfire.gateway.metrics import Metrics
    from twinfire.gateway.served_model import ServedModel
    from twinfire.gateway.server import GatewayServer

    names = options.served_model_names or (resolved.served_name,)
    model, metrics = ServedModel(names, parsers=options.parsers), Metrics(names[0])
    worker.report_load_to(metrics.observe_load)
    server = GatewayServer(create_app(settings, worker, model, metrics), bound)

    async def announce() -> None:
        stages.begin("tokenizer")
        await model.load_text(resolved.path)
        stages.begin("waiting for the worker")
        if model.load_error is None:
            await worker.settled.wait()
        metrics.startup_stages = stages.finish()
        info = worker.worker_info
        if info is None or model.load_error is not None:
            server.stop()
            return
        url = base_url(options.host, server.address[1], is_tls=settings.tls is not None)
        memory = await asyncio.to_thread(memory_message, info)
        message = ready_message(names[0], url, info, memory, process_age_s())
        print(message, file=sys.stderr, flush=True)

    announcing = asyncio.create_task(announce())
    try:
        await server.serve(handle_signals=True)
    finally:
        announcing.cancel()
        progress.close()
        await worker.stop()
    failure = worker.failure or model.load_error
    if failure is not None:
        raise TwinfireError(failure)


def _worker_config(options: ServeOptions, resolved: ResolvedModel) -> WorkerConfig:
    return WorkerConfig(
        model_path=str(resolved.path),
        served_name=resolved.served_name,
        socket_path="",
        dtype=options.dtype,
        backend=options.backend,
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
        speculate=options.speculate,
        device=options.device,
        threads=options.threads,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        kv_cache_bytes=options.kv_cache_bytes,
        weight_cache_dir=str(options.weight_cache_dir) if options.weight_cache_dir else None,
        weight_cache_bytes=options.weight_cache_bytes,
        scheduling_policy=options.scheduling_policy,
        enable_prefix_caching=options.enable_prefix_caching,
    )


def _gateway_settings(options: ServeOptions) -> GatewaySettings:
    access = options.access
    return GatewaySettings(
        aliases=options.aliases,
        workers_ai_streams=options.workers_ai_streams,
        api_keys=options.api_keys,
        access=access.mode(options.host),
        prices=read_price_file(access.prices) if access.prices else PriceTable(),
        database=access.database,
        tls=access.tls,
        otlp_endpoint=options.otlp_endpoint,
        drain_timeout_s=options.drain_timeout_s,
        allow_request_chat_template=options.allow_request_chat_template,
        vllm_metric_names=options.vllm_metric_names,
        limits=RequestLimits(max_logprobs=options.max_logprobs),
    )
