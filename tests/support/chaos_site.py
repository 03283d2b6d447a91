"""Real gateways and real workers that join them, every one to be killed, frozen or cut off."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import aiohttp

from support.completion_client import Answer, client_session, complete
from support.link_relay import LinkRelay
from support.serve_process import free_port
from twinfire.protocol.messages import Role
from twinfire.protocol.worker_config import WorkerConfig, encode_worker_config

Transport = Literal["unix", "tcp", "nixl"]
"""`nixl` has its control links over tcp."""

MODEL = "tiny"
LEASE_S = 1.5
DEADLINE_S = 20.0
"""In which every request has ended, whatever was lost."""
IDLE_WITHIN_S = 5.0
START_LIMIT_S = 60.0
GATEWAY_FILE = """
[gateway]
pd_policy = "always"
workers = "{workers}"
secret_file = "{secret}"
max_gateway_wait_s = {wait_s}
[model]
model = "{model}"
prefill = {{ count = 0 }}
decode = {{ count = 0 }}
"""
HELD = re.compile(
    r"^twinfire:(worker_kv_blocks_used|worker_kv_blocks_held|worker_hand_offs_open"
    r"|worker_requests_running|worker_requests_waiting|ledger_prefill_tokens|ledger_kv_blocks"
    r"|gateway_queue_requests)({[^}]*}) (\S+)$",
    re.MULTILINE,
)
"""What is 0 when nobody asks for anything."""


class Program:
    """A process and what it wrote."""

    def __init__(self, words: Sequence[str], log: Path, **environment: str) -> None:
        self.log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait(10)

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    async def until_fault(self, point: str, action: str, limit_s: float = 15.0) -> None:
        """Wait until a fault point has acted; AssertionError when it was not reached."""
        deadline_s = time.monotonic() + limit_s
        while f"twinfire fault {point} {action} " not in self.output():
            assert time.monotonic() < deadline_s, f"{point} was not reached:\n{self.output()}"
            await asyncio.sleep(0.01)


class Gateway:
    """`twinfire up` without workers of its own, at the same addresses in each of its lives."""

    def __init__(self, folder: Path, name: str, model: Path, secret: Path, workers: str) -> None:
        self.name = name
        self.workers = workers
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._log = folder / f"gateway-{name}.log"
        self._file = folder / f"gateway-{name}.toml"
        self._file.write_text(
            GATEWAY_FILE.format(workers=workers, secret=secret, model=model, wait_s=DEADLINE_S)
        )
        self.start()

    def start(self) -> None:
        words = [sys.executable, "-m", "twinfire.cli.main", "up", str(self._file)]
        self.program = Program([*words, "--port", str(self._port)], self._log)


class Site:
    """Two gateways and any workers. Workers reach gateway `a` through a relay that can be cut."""

    def __init__(self, folder: Path, model: Path, transport: Transport) -> None:
        self._folder = folder
        self._model = model
        self._transport: Transport = transport
        self._secret = folder / "secret"
        self._secret.write_bytes(os.urandom(32))
        self._secret.chmod(0o600)
        self.gateways = [
            Gateway(folder, name, model, self._secret, self._address(f"gateway-{name}"))
            for name in "ab"
        ]
        relayed = self._address("relay")
        self.relay = LinkRelay(relayed, self.gateways[0].workers)
        self._join = (relayed, self.gateways[1].workers)
        self._peer_addresses = [self._address(f"peer-{place}") for place in range(3)]
        self._num_started = 0
        self.workers: list[Program] = []
        self.session: aiohttp.ClientSession
        """Open within `clients`."""

    def close(self) -> None:
        self.relay.close()
        for program in (*self.workers, *(gateway.program for gateway in self.gateways)):
            program.kill()

    @contextlib.asynccontextmanager
    async def clients(self) -> Any:
        async with client_session(DEADLINE_S + 5) as self.session:
            yield self

    def worker(self, role: Role, *, place: int, **settings: Any) -> Program:
        """Start a worker; it listens where the last one of its `place` (0 to 2) did."""
        config = WorkerConfig(
            **{
                "model_path": str(self._model),
                "served_name": MODEL,
                "socket_path": "",
                "role": role,
                "threads": 1,
                "max_num_seqs": 16,
                "max_num_batched_tokens": 64,
                "kv_cache_bytes": 1 << 20,
                "join": self._join,
                "peer_address": self._peer_addresses[place],
                "secret_file": str(self._secret),
                "connector": "nixl" if self._transport == "nixl" else "socket",
                "lease_s": LEASE_S,
                "supervised": False,
                **settings,
            }
        )
        log = self._folder / f"worker-{self._num_started}.log"
        self._num_started += 1
        words = [sys.executable, "-m", "twinfire.worker", encode_worker_config(config)]
        program = Program(words, log, UCX_TLS="tcp")
        self.workers.append(program)
        return program

    async def joined(self, *programs: Program) -> None:
        """Wait until every gateway has these workers and no other."""
        wanted = {program.pid for program in programs}

        async def problem() -> object:
            for program in programs:
                assert program.is_running, program.output()
            for gateway in self.gateways:
                pids = {worker["pid"] for worker in await self.status(gateway)}
                if pids != wanted:
                    return gateway.name, pids, wanted
            return None

        await until(problem, START_LIMIT_S, "the workers have joined")

    async def status(self, gateway: Gateway) -> list[dict[str, Any]]:
        with suppress(aiohttp.ClientError, OSError):
            async with self.session.get(f"{gateway.url}/cluster/status") as response:
                workers: list[dict[str, Any]] = json.loads(await response.read())["workers"]
                return workers
        return []

    async def set_role(self, program: Program, role: Role) -> None:
        """Change a worker's role and wait until every gateway knows it."""
        for gateway in self.gateways:
            for worker in await self.status(gateway):
                if worker["pid"] == program.pid and worker["role"] != role:
                    body = {"worker": worker["instance_id"], "role": role}
                    async with self.session.post(f"{gateway.url}/cluster/role", json=body) as done:
                        assert done.status == 200, await done.text()

        async def problem() -> object:
            for gateway in self.gateways:
                for worker in await self.status(gateway):
                    if worker["pid"] == program.pid and worker["role"] != role:
                        return worker
            return None

        await until(problem, 5, f"the role is {role}")

    async def complete(self, gateway: Gateway, body: dict[str, Any], **options: Any) -> Answer:
        asked = {"model": MODEL, **body}
        return await complete(self.session, gateway.url, asked, **options)

    async def metrics(self, gateway: Gateway) -> str:
        async with self.session.get(f"{gateway.url}/metrics") as response:
            return await response.text()

    async def counter(self, gateway: Gateway, name: str) -> float:
        """Return a counter of a gateway, over all labels."""
        found = re.findall(
            rf"^twinfire:{name}_total{{[^}}]*}} (\S+)$", await self.metrics(gateway), re.MULTILINE
        )
        return sum(map(float, found))

    async def nothing_is_held(self) -> None:
        """Wait until no block, lease, charge or queue entry is left anywhere."""

        async def problem() -> object:
            held = {}
            for gateway in self.gateways:
                for name, labels, value in HELD.findall(await self.metrics(gateway)):
                    if float(value):
                        held[f"{gateway.name} {name}{labels}"] = float(value)
            return held or None

        await until(problem, IDLE_WITHIN_S, "nothing is held")

    def logs(self) -> str:
        programs = [*(gateway.program for gateway in self.gateways), *self.workers[-3:]]
        return "\n".join(f"--- {one.log.name}\n{one.output()[-2500:]}" for one in programs)

    def _address(self, name: str) -> str:
        if self._transport == "unix":
            return f"unix:{self._folder}/{name}"
        return f"tcp:127.0.0.1:{free_port()}"


async def until(condition: Any, limit_s: float, what: str) -> None:
    """Await `condition()` until it returns None; else it returns what is instead."""
    deadline_s = time.monotonic() + limit_s
    while (state := await condition()) is not None:
        assert time.monotonic() < deadline_s, f"not within {limit_s:g} s: {what}; {state}"
        await asyncio.sleep(0.03)
