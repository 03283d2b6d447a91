"""`twinfire edge`: a proxy before the gateways of several regions."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys

from twinfire.cli.byte_size import parse_byte_size
from twinfire.cli.ready_message import base_url
from twinfire.gateway.edge.edge import Edge
from twinfire.gateway.edge.edge_server import EdgeServer
from twinfire.gateway.edge.edge_settings import EdgeSettings, check_regions, parse_region
from twinfire.gateway.listening import bind_socket, run_event_loop


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    parser = subparsers.add_parser(
        "edge",
        help="one address before the gateways of several regions",
        description="Send each session to the same region while that is healthy, else to the next.",
    )
    parser.add_argument(
        "--region",
        action="append",
        required=True,
        metavar="NAME=URL",
        help="a gateway and the name of its region, repeatable",
    )
    parser.add_argument("--host", default="127.0.0.1", help="(%(default)s)")
    parser.add_argument("--port", type=int, default=8080, help="(%(default)s)")
    parser.add_argument(
        "--health-interval", type=float, default=2.0, metavar="SECONDS", help="(%(default)s)"
    )
    parser.add_argument(
        "--silence-timeout",
        type=float,
        default=660.0,
        metavar="SECONDS",
        help="how long a gateway may send nothing (%(default)s)",
    )
    parser.add_argument(
        "--max-body", type=parse_byte_size, default="16MiB", metavar="SIZE", help="(%(default)s)"
    )
    parser.add_argument(
        "--drain-timeout", type=float, default=30.0, metavar="SECONDS", help="(%(default)s)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT. TwinfireError says why it could not start."""
    logging.basicConfig(level="INFO", format="%(asctime)s %(name)s %(levelname)s %(message)s")
    regions = tuple(map(parse_region, args.region))
    check_regions(regions)
    settings = EdgeSettings(
        regions,
        health_interval_s=args.health_interval,
        silence_timeout_s=args.silence_timeout,
        max_body_bytes=args.max_body,
        drain_timeout_s=args.drain_timeout,
    )
    run_event_loop(_serve(settings, args.host, args.port))
    return 0


async def _serve(settings: EdgeSettings, host: str, port: int) -> None:
    edge = Edge(settings)
    server = EdgeServer(edge, bind_socket(host, port), settings.drain_timeout_s)
    serving = asyncio.create_task(server.serve(handle_signals=True))
    starting = asyncio.create_task(server.started.wait())
    await asyncio.wait({serving, starting}, return_when=asyncio.FIRST_COMPLETED)
    if starting.done():
        states = (
            f"{region.name} ({'healthy' if region.health.is_healthy else 'not healthy'})"
            for region in edge.regions
        )
        url = base_url(host, server.address[1])
        print(f"edge is ready at {url}: {', '.join(states)}", file=sys.stderr, flush=True)
    starting.cancel()
    await serving
