"""`twinfire worker`: one worker, started by hand, that joins gateways by their addresses."""

from __future__ import annotations

import argparse
import os
import sys

from twinfire.artifacts.aliases import DEFAULT_ALIAS
from twinfire.artifacts.env import Env
from twinfire.artifacts.model_store import resolve_model
from twinfire.cli.byte_size import parse_byte_size
from twinfire.cli.device_option import add_device_argument
from twinfire.cli.pull_progress import pull_progress
from twinfire.cli.scale_command import ROLES
from twinfire.cli.speculate_option import add_speculate_argument
from twinfire.protocol.addresses import parse_address
from twinfire.protocol.errors import TwinfireError
from twinfire.protocol.worker_config import TlsFiles, WorkerConfig, encode_worker_config


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    parser = subparsers.add_parser("worker", help="run one worker and join a cluster")
    parser.add_argument("model", nargs="?", default=DEFAULT_ALIAS, metavar="MODEL")
    parser.add_argument("--name", default="", help="what logs and `twinfire status` call it")
    parser.add_argument("--role", choices=ROLES, default="mixed", help="(%(default)s)")
    parser.add_argument(
        "--join",
        action="append",
        required=True,
        metavar="ADDRESS",
        help="where a gateway takes workers (tcp:host:port or unix:/path), repeatable",
    )
    parser.add_argument(
        "--peer-address",
        default="tcp:127.0.0.1:0",
        metavar="ADDRESS",
        help="where other workers reach this one (%(default)s); empty exchanges no KV",
    )
    parser.add_argument("--secret-file", metavar="FILE", help="the cluster's secret")
    parser.add_argument("--tls-certificate", metavar="FILE")
    parser.add_argument("--tls-key", metavar="FILE")
    parser.add_argument("--tls-authority", metavar="FILE")
    parser.add_argument("--connector", choices=["socket", "nixl"], default="socket")
    parser.add_argument("--threads", type=int)
    parser.add_argument(
        "--use-idle-cores",
        action="store_true",
        help="compute on more threads while cores would be idle otherwise",
    )
    parser.add_argument("--quantization", choices=["auto", "none", "int8", "int4"], default="auto")
    add_speculate_argument(parser)
    add_device_argument(parser)
    parser.add_argument("--kv-cache-memory", type=parse_byte_size, metavar="SIZE")
    parser.add_argument("--max-model-len", type=int, metavar="TOKENS")
    parser.add_argument("--served-model-name", metavar="NAME")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Become the worker's process; returns only when that cannot be."""
    for address in (*args.join, *([args.peer_address] if args.peer_address else [])):
        parse_address(address)
    with pull_progress(args.model) as report:
        resolved = resolve_model(args.model, on_progress=report)
    config = WorkerConfig(
        model_path=str(resolved.path),
        served_name=args.served_model_name or resolved.served_name,
        socket_path="",
        name=args.name,
        role=args.role,
        join=tuple(args.join),
        peer_address=args.peer_address,
        secret_file=args.secret_file,
        tls=_tls_files(args),
        connector=args.connector,
        threads=args.threads,
        use_idle_cores=args.use_idle_cores,
        quantization=args.quantization,
        speculate=args.speculate,
        device=args.device,
        kv_cache_bytes=args.kv_cache_memory,
        max_model_len=args.max_model_len,
        weight_cache_dir=str(Env.read().cache_dir / "packed-weights"),
        supervised=False,
    )
    words = [sys.executable, "-m", "twinfire.worker", encode_worker_config(config)]
    os.execv(sys.executable, words)


def _tls_files(args: argparse.Namespace) -> TlsFiles | None:
    given = (args.tls_certificate, args.tls_key, args.tls_authority)
    if not any(given):
        return None
    if not all(given):
        raise TwinfireError("--tls-certificate, --tls-key and --tls-authority go together")
    return TlsFiles(certificate=given[0], key=given[1], authority=given[2])
