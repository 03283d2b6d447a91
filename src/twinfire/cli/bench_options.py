"""The options of `twinfire bench load`: those of every scenario, and each scenario's own.

Owns names, checks and help texts. Options that hold for any scenario may stand before or after
its name.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from twinfire.bench.parameters import (
    Agent,
    Concurrent,
    InterferenceStreams,
    Prefix,
    RateSweep,
    Scenario,
    TraceReplay,
    with_parameters,
)
from twinfire.bench.request import JsonValue
from twinfire.bench.target import DEFAULT_TIMEOUT_S, SESSION_HEADER, Target
from twinfire.protocol.errors import TwinfireError

SINGLE = Concurrent(
    name="single", num_requests=5, concurrency=1, input_tokens=128, output_tokens=128
)
LONG = Concurrent(name="long", num_requests=3, concurrency=1, input_tokens=4000, output_tokens=16)

_HELP = {
    "num_requests": "requests to send",
    "concurrency": "requests at any time",
    "input_tokens": "prompt length, in the server's tokens",
    "output_tokens": "answer length",
    "streams": "decode streams kept running",
    "long_requests": "long prompts to send",
    "long_input_tokens": "length of a long prompt",
    "long_output_tokens": "answer length of a long prompt",
    "interval_s": "seconds between long prompts",
    "sessions": "conversations at once",
    "turns": "turns of each conversation",
    "system_tokens": "length of the system prompt",
    "turn_tokens": "length of each user turn",
    "think_s": "seconds between an answer and the next turn",
    "share_system_prompt": "give all sessions one system prompt",
    "send_session": "send the session-affinity header",
    "prefix_tokens": "length of the shared system prompt",
    "rates_per_s": "requests per second, one phase each",
    "max_requests": "take only the first so many requests of the trace",
    "time_scale": "multiply arrival times by this",
    "length_scale": "multiply lengths by this (default: so that 99 %% of the requests fit)",
}


def positive_int(text: str) -> int:
    """Parse a whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least 1")
    return number


def positive_float(text: str) -> float:
    """Parse a number above 0."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: more than 0")
    return number


def not_negative_float(text: str) -> float:
    """Parse a number of at least 0."""
    number = float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: at least 0")
    return number


def not_negative_int(text: str) -> int:
    """Parse a whole number of at least 0."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text}: at least 0")
    return number


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Add the URL, the common options and a sub-parser for each scenario."""
    parser.add_argument("url", metavar="URL", help="such as http://127.0.0.1:8000")
    _add_common_options(parser, suppress_defaults=False)
    parser.set_defaults(scenario=None)
    scenarios = parser.add_subparsers(metavar="SCENARIO")

    def add(name: str, description: str, defaults: Scenario) -> argparse.ArgumentParser:
        sub = scenarios.add_parser(name, help=description, description=description)
        _add_common_options(sub, suppress_defaults=True)
        _add_fields(sub.add_argument_group("scenario"), defaults)
        sub.set_defaults(scenario=defaults)
        return sub

    add("single", "one request at a time", SINGLE)
    add("concurrent", "N requests at once, equal lengths", Concurrent())
    add("long", "long prompts, one at a time", LONG)
    add("interference", "decode streams while long prompts arrive", InterferenceStreams())
    add("agent", "conversations whose history grows, with a session key", Agent())
    add("prefix", "a long system prompt that all requests share", Prefix())
    add("rate", "Poisson arrivals at one rate after the other", RateSweep())
    trace = add("trace", "replay a real trace (Mooncake or Azure)", TraceReplay(Path()))
    trace.add_argument("path", type=Path, metavar="FILE", help="the trace, .jsonl or .csv")


def _add_fields(group: argparse._ArgumentGroup, defaults: Scenario) -> None:
    for field in dataclasses.fields(defaults):
        default = getattr(defaults, field.name)
        if field.name in ("name", "path"):
            continue
        option = "--" + field.name.removesuffix("_s").removesuffix("_per").replace("_", "-")
        text = _HELP[field.name]
        if isinstance(default, bool):
            group.add_argument(
                option,
                dest=field.name,
                action=argparse.BooleanOptionalAction,
                default=default,
                help=text,
            )
            continue
        many = isinstance(default, tuple)
        shown = " ".join(f"{value:g}" for value in default) if many else default
        group.add_argument(
            option,
            dest=field.name,
            type=_parser_of(field.name),
            nargs="+" if many else None,
            default=default,
            metavar="N",
            help=text if default is None else f"{text} (default: {shown})",
        )


def _parser_of(name: str) -> Callable[[str], float]:
    if name == "think_s":
        return not_negative_float
    if name.endswith("_s") or name.endswith("_scale"):
        return positive_float
    return positive_int


def _add_common_options(parser: argparse.ArgumentParser, *, suppress_defaults: bool) -> None:
    """A sub-parser must not write defaults over what stood before the scenario's name."""

    def add(
        group: argparse._ArgumentGroup,
        option: str,
        kind: Callable[[str], object],
        text: str,
        default: object = None,
        choices: Sequence[str] | None = None,
    ) -> None:
        shown = f"{text} (default: {default})" if default is not None else text
        group.add_argument(
            option,
            type=kind,
            help=shown,
            choices=choices,
            default=argparse.SUPPRESS if suppress_defaults else default,
        )

    server = parser.add_argument_group("server")
    add(server, "--model", str, "model id; else the first of /v1/models")
    add(server, "--api", str, "endpoint", "chat", ("chat", "completions"))
    add(server, "--api-key", str, "sent as a bearer token")
    add(server, "--api-key-file", Path, "file that holds the key, which then is not in `ps`")
    add(server, "--session-header", str, "header of a session's key", SESSION_HEADER)
    add(server, "--extra-body", _json_object, "JSON object to merge into every request body")
    add(server, "--timeout", positive_float, "seconds for one request", DEFAULT_TIMEOUT_S)
    add(server, "--max-model-len", positive_int, "the model's window, if the server hides it")
    run = parser.add_argument_group("run")
    add(run, "--seed", not_negative_int, "repeat the prompts of an earlier run; else new ones")
    add(run, "--text", Path, "file or folder to take prompt text from; else Python's own library")
    add(run, "--warmup", not_negative_int, "requests before the measured ones", 1)
    add(run, "--slo-ttft-ms", positive_float, "objective: time to first token")
    add(run, "--slo-itl-ms", positive_float, "objective: a request's mean inter-token latency")
    add(run, "--slo-e2e-ms", positive_float, "objective: a whole answer")
    add(run, "--json", Path, "write the result there")
    add(run, "--plot", Path, "draw the result there (.png, .svg, .pdf)")


def _json_object(text: str) -> dict[str, JsonValue]:
    try:
        value: dict[str, JsonValue] = msgspec.json.decode(text, type=dict)
    except msgspec.DecodeError as error:
        raise argparse.ArgumentTypeError(f"not a JSON object: {error}") from None
    return value


def load_target(args: argparse.Namespace) -> Target:
    """Return the server that the options name."""
    return Target(
        url=checked_url(args.url),
        model=args.model,
        api=args.api,
        api_key=api_key_of(args),
        session_header=args.session_header,
        timeout_s=args.timeout,
        extra_body=args.extra_body or {},
    )


def checked_url(url: str) -> str:
    """Return a URL that can be called; TwinfireError when it has no scheme."""
    if not url.startswith(("http://", "https://")):
        raise TwinfireError(f"{url}: a URL begins with http:// or https://")
    return url


def api_key_of(args: argparse.Namespace) -> str | None:
    """Return the key given directly or in a file; TwinfireError when the file cannot be read."""
    if args.api_key_file is None:
        key: str | None = args.api_key
        return key
    try:
        return Path(args.api_key_file).read_text().strip()
    except OSError as error:
        raise TwinfireError(f"--api-key-file {args.api_key_file}: {error.strerror}") from None


def load_scenarios(args: argparse.Namespace) -> list[Scenario]:
    """Return the chosen scenario with its parameters, or the default ones."""
    defaults: Scenario | None = args.scenario
    if defaults is None:
        return [SINGLE, Concurrent()]
    names = [field.name for field in dataclasses.fields(defaults) if field.name != "name"]
    return [with_parameters(defaults, {name: getattr(args, name) for name in names})]
