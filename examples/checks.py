"""What the Python examples share: their arguments, and a line for each check.

An example says how its client does a thing; this file says when to call that done.
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Server:
    """Where an example's requests go. `url` has no path; clients add `/v1` or their own."""

    url: str
    api_key: str
    model: str


def server_of_arguments(description: str | None) -> Server:
    """Read `URL [--api-key KEY] [--model NAME]` from the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("url", help="such as http://127.0.0.1:8000")
    parser.add_argument("--api-key", default="none", help="default: none, for a server without")
    parser.add_argument("--model", default="smollm2-135m", help="default: %(default)s")
    arguments = parser.parse_args()
    return Server(arguments.url.rstrip("/"), arguments.api_key, arguments.model)


def run_checks(checks: Mapping[str, Callable[[], str]]) -> int:
    """Run all checks, print `ok` or `FAILED` for each with what it saw, return the exit status."""
    num_failed = 0
    for name, check in checks.items():
        started_s = time.monotonic()
        try:
            seen = check()
        except Exception:
            num_failed += 1
            print(f"FAILED {name}\n{traceback.format_exc()}", flush=True)
        else:
            print(f"ok     {name} ({time.monotonic() - started_s:.1f} s): {seen}", flush=True)
    return 1 if num_failed else 0


def require(condition: object, message: str) -> None:
    """Fail the running check, also under `python -O`."""
    if not condition:
        raise ValueError(message)
