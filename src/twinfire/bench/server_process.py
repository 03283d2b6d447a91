"""A server under measurement as a child process: start, readiness, stop.

Each server leads a session of its own, so that stopping it stops every process it started. Output
goes to a file, whose end is shown when the server fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import aiohttp

from twinfire.bench.process_tree import scan_processes, tree_of
from twinfire.protocol.errors import TwinfireError

READY_POLL_S = 0.02
STOP_TIMEOUT_S = 30.0
_TAIL_BYTES = 2000
Result = TypeVar("Result")


class ServerFailed(TwinfireError):
    """The server ended or did not become ready; the message shows the end of its output."""


def url_of_command(command: Sequence[str], default: str = "http://127.0.0.1:8000") -> str:
    """Return where a command will listen, by its --host and --port options."""
    parts = urlsplit(default)
    options = {"--host": parts.hostname or "127.0.0.1", "--port": str(parts.port or 80)}
    for index, word in enumerate(command):
        name, equals, value = word.partition("=")
        if name in options:
            options[name] = value if equals else (command[index + 1 : index + 2] or [""])[0]
    host = "127.0.0.1" if options["--host"] in ("0.0.0.0", "::") else options["--host"]
    return f"http://{host}:{options['--port']}"


def run_until_signal(main: Coroutine[object, object, Result]) -> Result:
    """Run a coroutine so that SIGTERM, like Ctrl-C, unwinds it and its servers are stopped.

    KeyboardInterrupt then.
    """

    async def cancellable() -> Result:
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await main

    try:
        return asyncio.run(cancellable())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


class ServerProcess:
    """Use as `async with ServerProcess(command, url, log) as server`."""

    def __init__(self, command: Sequence[str], url: str, log: Path) -> None:
        self.command = list(command)
        self.url = url.rstrip("/").removesuffix("/v1")
        self.log = log
        self.started_s = 0.0
        """Monotonic time of the start."""
        self._process: asyncio.subprocess.Process | None = None
        self._stopped = False

    async def __aenter__(self) -> ServerProcess:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def pid(self) -> int:
        """The process id of the command."""
        assert self._process is not None, "the server was not started"
        return self._process.pid

    async def start(self) -> None:
        """Start the command; ServerFailed when it does not exist or the port is taken."""
        if await self.port_is_open():
            raise ServerFailed(
                f"something listens at {self.url} already: stop it, or change --port"
            )
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as output:
            self.started_s = time.monotonic()
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *self.command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=asyncio.subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise ServerFailed(f"cannot start {self.command[0]}: {error}") from None

    async def port_is_open(self) -> bool:
        """Whether something accepts connections there."""
        parts = urlsplit(self.url)
        try:
            _, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
        except OSError:
            return False
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return True

    async def wait_for_port(self, deadline_s: float) -> float:
        """Return the monotonic time of the first accepted connection; ServerFailed if none."""
        while not await self.port_is_open():
            await self._pause(deadline_s, "opened no port")
        return time.monotonic()

    async def wait_until_ready(self, deadline_s: float) -> float:
        """Return the monotonic time of the first 200 from `/health`; ServerFailed otherwise."""
        async with aiohttp.ClientSession() as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                    async with session.get(f"{self.url}/health") as response:
                        if response.status == 200:
                            return time.monotonic()
                await self._pause(deadline_s, "was not ready")

    async def _pause(self, deadline_s: float, failure: str) -> None:
        assert self._process is not None, "the server was not started"
        if self._process.returncode is not None:
            raise ServerFailed(
                f"{self.command[0]} ended with status {self._process.returncode}:\n{self.tail()}"
            )
        if time.monotonic() > deadline_s:
            seconds = deadline_s - self.started_s
            raise ServerFailed(
                f"{self.command[0]} {failure} within {seconds:.0f} s:\n{self.tail()}"
            )
        await asyncio.sleep(READY_POLL_S)

    def tail(self) -> str:
        """Return the end of the server's output."""
        return self.log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")

    async def stop(self) -> int:
        """Ask for the end, then force it; returns the exit status, negative for a signal."""
        process = self._process
        assert process is not None, "the server was not started"
        if self._stopped and process.returncode is not None:
            return process.returncode
        self._stopped = True
        members = [member.pid for member in tree_of(process.pid, scan_processes())]
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        _kill_left_over(process.pid, members)
        assert process.returncode is not None, "the process was waited for"
        return process.returncode


def _kill_left_over(session: int, members: Sequence[int]) -> None:
    """End what outlived its parent: processes of the session, and known members that still are."""
    for process in scan_processes():
        same_life = process.pid in members and process.parent == 1
        if process.session == session or same_life:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGKILL)
