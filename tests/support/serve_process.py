"""`twinfire serve` as a child process, as a user starts it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_LIMIT_S = 120.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class ServeProcess:
    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def output(self) -> str:
        return self.log.read_text()

    def get(self, path: str) -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=30) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def metric(self, name: str) -> float:
        _, body = self.get("/metrics")
        match = re.search(rf"^twinfire:{name}{{[^}}]*}} (\S+)$", body.decode(), re.MULTILINE)
        assert match is not None, f"no metric {name}"
        return float(match.group(1))

    def worker_pids(self) -> list[int]:
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    def wait_until_ready(self) -> None:
        deadline_s = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline_s:
            assert self.process.poll() is None, self.output()
            try:
                if self.get("/health")[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.05)
        raise AssertionError(f"not ready after {START_LIMIT_S} s:\n{self.output()}")

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextmanager
def serve_process(
    folder: Path, *options: str, ready: bool = True, weight_cache: Path | None = None
) -> Iterator[ServeProcess]:
    """Start a server on a free port with one compute thread, and stop it at the end."""
    cache = ("--weight-cache-dir", str(weight_cache)) if weight_cache else ("--no-weight-cache",)
    with _process(folder, "serve", "--threads", "1", *cache, *options, ready=ready) as server:
        yield server


@contextmanager
def up_process(folder: Path, *options: str) -> Iterator[ServeProcess]:
    """Start a cluster on a free port, and stop it at the end."""
    with _process(folder, "up", *options, ready=True) as cluster:
        yield cluster


@contextmanager
def _process(folder: Path, command: str, *options: str, ready: bool) -> Iterator[ServeProcess]:
    port = free_port()
    log = folder / f"{command}.log"
    words = [sys.executable, "-m", "twinfire.cli.main", command, "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*words, *options],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    server = ServeProcess(process, f"http://127.0.0.1:{port}", log)
    try:
        if ready:
            server.wait_until_ready()
        yield server
    finally:
        server.stop()
