"""Certificates of a small cluster, made once by `tests/data/tls/make.sh`."""

from __future__ import annotations

from pathlib import Path

from twinfire.protocol.worker_config import TlsFiles

FOLDER = Path(__file__).parent.parent / "data" / "tls"


def end_of(authority: str, name: str) -> TlsFiles:
    return TlsFiles(
        certificate=str(FOLDER / f"{name}.pem"),
        key=str(FOLDER / f"{name}.key"),
        authority=str(FOLDER / f"{authority}.pem"),
    )


GATEWAY = end_of("cluster", "gateway")
WORKER = end_of("cluster", "worker")
STRANGER = end_of("elsewhere", "stranger")
"""Of another cluster."""
IMPOSTOR = end_of("cluster", "stranger")
"""Trusts this cluster, whose authority has not signed it."""
