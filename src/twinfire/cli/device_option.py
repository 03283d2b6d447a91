"""The option --device, of every command that starts workers."""

from __future__ import annotations

import argparse

from twinfire.protocol.worker_config import parse_device


def add_device_argument(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, default: str | None = "cpu"
) -> None:
    """Declare the option; its value is a text that `parse_device` takes, or the default."""
    parser.add_argument(
        "--device",
        type=_device,
        default=default,
        metavar="DEVICE",
        help="cpu, or cuda or cuda:N, which computes with torch (default: cpu)",
    )


def _device(text: str) -> str:
    try:
        return parse_device(text)
    except ValueError as fault:
        raise argparse.ArgumentTypeError(str(fault)) from None
