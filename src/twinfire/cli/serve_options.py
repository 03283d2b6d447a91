"""The options of `twinfire serve`, checked, as one value."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path

from twinfire.artifacts.aliases import DEFAULT_ALIAS
from twinfire.artifacts.env import Env
from twinfire.cli.access_options import AccessOptions, access_options, add_access_arguments
from twinfire.cli.alias_option import add_alias_argument, parse_aliases
from twinfire.cli.byte_size import parse_byte_size
from twinfire.cli.device_option import add_device_argument
from twinfire.cli.speculate_option import add_speculate_argument
from twinfire.cli.tracing_option import add_tracing_argument, checked_endpoint
from twinfire.gateway.settings import WorkersAiStreams
from twinfire.gateway.text.answer_formats import REASONING_PARSERS, TOOL_PARSERS, ParserChoice
from twinfire.protocol.worker_config import (
    Backend,
    Dtype,
    KvCacheDtype,
    Quantization,
    SchedulingPolicy,
)

DTYPE_NAMES: dict[str, Dtype] = {
    "auto": "auto",
    "f32": "f32",
    "float32": "f32",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "f16": "f16",
    "float16": "f16",
}


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What the operator asked for; None leaves the choice to the program."""

    model: str
    host: str
    port: int
    served_model_names: tuple[str, ...]
    aliases: dict[str, str]
    workers_ai_streams: WorkersAiStreams
    parsers: ParserChoice
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int | None
    kv_cache_bytes: int | None
    dtype: Dtype
    backend: Backend
    quantization: Quantization
    kv_cache_dtype: KvCacheDtype
    speculate: str
    device: str
    threads: int | None
    weight_cache_dir: Path | None
    weight_cache_bytes: int
    scheduling_policy: SchedulingPolicy
    enable_prefix_caching: bool
    api_keys: tuple[str, ...]
    max_logprobs: int
    allow_request_chat_template: bool
    vllm_metric_names: bool
    drain_timeout_s: float
    log_level: str
    otlp_endpoint: str | None = None
    access: AccessOptions = field(default_factory=AccessOptions)


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `ServeOptions` and --config."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        default=DEFAULT_ALIAS,
        help="a model folder, a .gguf file or an alias (default: %(default)s)",
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with any of these options")
    _add_network_arguments(parser)
    add_access_arguments(parser)
    _add_engine_arguments(parser)


def _add_network_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("network")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    group.add_argument("--port", type=_port, default=8000, help="TCP port, 0 for any (%(default)s)")
    group.add_argument(
        "--served-model-name",
        action="append",
        default=[],
        metavar="NAME",
        help="public name of the model, repeatable (default: the alias or the folder's name)",
    )
    add_alias_argument(group)
    group.add_argument(
        "--workers-ai-streams",
        choices=["auto", "native", "openai"],
        default="auto",
        help="how streams of /ai/run look; auto goes by the model's name (%(default)s)",
    )
    group.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="require this bearer token, repeatable (default: none needed)",
    )
    group.add_argument(
        "--max-logprobs", type=_positive, default=20, help="alternatives per token (%(default)s)"
    )
    group.add_argument(
        "--tool-parser",
        choices=TOOL_PARSERS,
        default="auto",
        help="how the model writes tool calls; auto looks at its chat template (%(default)s)",
    )
    group.add_argument(
        "--reasoning-parser",
        choices=REASONING_PARSERS,
        default="auto",
        help="how the model marks what it thinks before it answers (%(default)s)",
    )
    group.add_argument(
        "--allow-request-chat-template",
        action="store_true",
        help="let requests bring their own chat template",
    )
    group.add_argument(
        "--vllm-metric-names",
        action="store_true",
        help="publish every metric under the prefix vllm: too",
    )
    group.add_argument(
        "--drain-timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="how long running requests may go on after SIGTERM (%(default)s)",
    )
    add_tracing_argument(group)
    group.add_argument("--log-level", choices=["debug", "info", "warning", "error"], default="info")


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--max-model-len",
        type=_positive,
        metavar="TOKENS",
        help="prompt and output together (default: the model's window)",
    )
    group.add_argument(
        "--max-num-seqs", type=_positive, default=64, help="sequences at once (%(default)s)"
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=_positive,
        metavar="TOKENS",
        help="token budget of a step (default: 256 for each thread; 4096 on a GPU)",
    )
    group.add_argument(
        "--kv-cache-memory",
        type=_byte_size,
        metavar="SIZE",
        help="memory for the KV cache, such as 2GiB (default: a quarter of what is available)",
    )
    group.add_argument(
        "--dtype",
        choices=sorted(DTYPE_NAMES),
        default="auto",
        help="what the model computes in; auto is bf16, or f32 on torch for weights in f32",
    )
    group.add_argument(
        "--quantization",
        choices=["auto", "none", "int8", "int4"],
        default="auto",
        help="auto keeps the precision of the weights' own format, none is bf16 (%(default)s)",
    )
    group.add_argument(
        "--kv-cache-dtype",
        choices=["auto", "bf16", "int8"],
        default="auto",
        help="keys and values; int8 halves their memory (default: what the model computes in)",
    )
    add_speculate_argument(group)
    add_device_argument(group)
    group.add_argument(
        "--backend",
        choices=["auto", "native", "torch"],
        default="auto",
        help="kernels; auto is native wherever they can do what is asked (%(default)s)",
    )
    group.add_argument(
        "--threads", type=_positive, help="compute threads (default: the cores that are usable)"
    )
    group.add_argument(
        "--no-weight-cache",
        action="store_true",
        help="do not keep packed weights on disk for the next start",
    )
    group.add_argument(
        "--weight-cache-dir",
        type=Path,
        metavar="FOLDER",
        help="where to keep them (default: packed-weights in the user's cache)",
    )
    group.add_argument(
        "--weight-cache-size",
        type=_byte_size,
        default=16 << 30,
        metavar="SIZE",
        help="what all of them may take; the longest unused go first (default: 16GiB)",
    )
    group.add_argument(
        "--scheduling-policy",
        choices=["fair", "fcfs", "priority"],
        default="fair",
        help="whose prompt is computed first: fair is who has waited longest for its length, so "
        "that short ones pass long ones (default: %(default)s)",
    )
    group.add_argument(
        "--no-prefix-caching", action="store_true", help="compute every prompt from its start"
    )


def serve_options(args: argparse.Namespace) -> ServeOptions:
    """Return the options that were parsed."""
    return ServeOptions(
        model=args.model,
        host=args.host,
        port=args.port,
        served_model_names=tuple(args.served_model_name),
        aliases=parse_aliases(args.alias),
        workers_ai_streams=args.workers_ai_streams,
        parsers=ParserChoice(args.tool_parser, args.reasoning_parser),
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        kv_cache_bytes=args.kv_cache_memory,
        dtype=DTYPE_NAMES[args.dtype],
        backend=args.backend,
        quantization=args.quantization,
        kv_cache_dtype=args.kv_cache_dtype,
        speculate=args.speculate,
        device=args.device,
        threads=args.threads,
        weight_cache_dir=_weight_cache_dir(args),
        weight_cache_bytes=args.weight_cache_size,
        scheduling_policy=args.scheduling_policy,
        enable_prefix_caching=not args.no_prefix_caching,
        api_keys=tuple(args.api_key),
        max_logprobs=args.max_logprobs,
        allow_request_chat_template=args.allow_request_chat_template,
        vllm_metric_names=args.vllm_metric_names,
        drain_timeout_s=args.drain_timeout,
        log_level=args.log_level,
        otlp_endpoint=checked_endpoint(args.otlp_endpoint),
        access=access_options(args),
    )


def _weight_cache_dir(args: argparse.Namespace) -> Path | None:
    if args.no_weight_cache:
        return None
    folder: Path = args.weight_cache_dir or Env.read().cache_dir / "packed-weights"
    return folder


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{value} is not between 0 and 65535")
    return value


def _byte_size(text: str) -> int:
    try:
        return parse_byte_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
