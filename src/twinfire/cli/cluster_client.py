"""Calling the administration endpoints of a running cluster, and showing what they answer."""

from __future__ import annotations

import argparse
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twinfire.protocol.errors import TwinfireError
from twinfire.protocol.key_file import load_key

DEFAULT_URL = "http://127.0.0.1:8000"
_TIMEOUT_S = 90.0
"""Scaling down waits for what runs."""


def add_connection_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare how the gateway is reached."""
    parser.add_argument("--url", default=DEFAULT_URL, help="the gateway (%(default)s)")
    keys = parser.add_mutually_exclusive_group()
    keys.add_argument("--api-key-file", type=Path, help="file with the gateway's key")
    keys.add_argument(
        "--admin-key-file",
        type=Path,
        help="file with the administrator's key, where the gateway has one",
    )
    parser.add_argument("--json", action="store_true", help="print the answer as it came")


def call(
    args: argparse.Namespace, path: str, body: dict[str, object] | None = None
) -> dict[str, Any]:
    """Return the gateway's answer; TwinfireError with its message, or why there is none."""
    request = urllib.request.Request(args.url.rstrip("/") + path)
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("content-type", "application/json")
    key_file = args.admin_key_file or args.api_key_file
    if key_file is not None:
        request.add_header("authorization", f"Bearer {load_key(key_file, 'the key')}")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            status: dict[str, Any] = json.load(answer)
            return status
    except urllib.error.HTTPError as error:
        raise TwinfireError(_fault_message(error)) from None
    except (OSError, ValueError) as error:
        raise TwinfireError(f"no cluster answers at {args.url}: {error}") from None


def show(args: argparse.Namespace, status: dict[str, Any]) -> None:
    """Print a cluster's status, as a table or as JSON."""
    if args.json:
        print(json.dumps(status, indent=2))
        return
    places = ("worker", "role", "pid", "host")
    header = (*places, "running", "waiting", "KV used/total", "drafts", "state")
    rows = [
        (
            worker["name"],
            worker["role"],
            str(worker["pid"]),
            worker["host"],
            str(worker["running"]),
            str(worker["waiting"]),
            f"{worker['kv_blocks_used']}/{worker['kv_blocks_total']}",
            _drafts(worker),
            ("draining" if worker["draining"] else "ready") + _restarts(worker),
        )
        for worker in status["workers"]
    ]
    rows += [
        (worker["name"], worker["role"], *("-",) * 6, _absence(worker))
        for worker in status["absent"]
    ]
    if rows or not status["engines"]:
        _print_table(header, rows)
    if status["engines"]:
        _print_table(
            ("engine", "of", "stage", "model", "running", "requests", "failures", "state"),
            [
                (
                    engine["url"],
                    engine["engine"],
                    engine["stage"],
                    engine["model"],
                    *(str(engine[count]) for count in ("running", "requests", "failures")),
                    engine["state"],
                )
                for engine in status["engines"]
            ],
        )
    if status["queued_requests"]:
        print(f"{status['queued_requests']} requests wait ({status['queued_tokens']} tokens)")
    if status["unready_reason"]:
        print(f"not ready: {status['unready_reason']}")


def _print_table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


def _drafts(worker: dict[str, Any]) -> str:
    """Return the share of draft tokens that was accepted, and the tokens of a step with drafts."""
    drafted, accepted = worker.get("drafted", ()), worker.get("accepted", ())
    if not any(drafted):
        return "-"
    share, length = sum(accepted) / sum(drafted), 1 + sum(accepted) / drafted[0]
    return f"{share:.0%}, {length:.1f} tokens"


def _absence(worker: dict[str, Any]) -> str:
    told: str = worker["state"]
    if worker["next_start_in_s"] is not None:
        told += f" in {worker['next_start_in_s']:.1f} s"
    return told + _restarts(worker) + (f": {worker['reason']}" if worker["reason"] else "")


def _restarts(worker: dict[str, Any]) -> str:
    return f" ({worker['restarts']} restarts)" if worker["restarts"] else ""


def _fault_message(error: urllib.error.HTTPError) -> str:
    try:
        message: str = json.load(error)["error"]["message"]
        return message
    except (ValueError, KeyError, TypeError):
        return f"{error.url} answered {error.code}"
