"""Real worker processes and a scripted gateway that they join, over unix or tcp sockets."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from twinfire.protocol.framing import encode_frame, gateway_side_decoder
from twinfire.protocol.link_auth import LinkHandshake
from twinfire.protocol.messages import (
    PROTOCOL_VERSION,
    Alive,
    CacheEvents,
    Cancel,
    ChoiceDelta,
    Failed,
    HandOff,
    HandOffFailed,
    Hello,
    Load,
    Peer,
    PrefixPull,
    PromptDone,
    Ready,
    Rejected,
    Reserve,
    Reserved,
    Role,
    StepFrame,
    Submit,
    ToGateway,
    ToWorker,
    WorkerInfo,
)
from twinfire.protocol.sampling import SamplingParams
from twinfire.protocol.tokens import pack_ids, unpack_ids
from twinfire.protocol.worker_config import WorkerConfig, encode_worker_config

WAIT_LIMIT_S = 30.0
SECRET = b"a secret that only this test knows"


@dataclass
class Answer:
    """What workers said of one request."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    prompt: PromptDone | None = None
    rejected: Rejected | None = None
    failed: list[HandOffFailed] = field(default_factory=list)
    reserved: Reserved | None = None

    def is_done(self, n: int = 1) -> bool:
        return len(self.finish) == n


class JoinedWorker(asyncio.Protocol):
    """The gateway's end of one worker's link."""

    def __init__(self, gateway: ScriptedGateway) -> None:
        self._gateway = gateway
        self._decoder = gateway_side_decoder()
        self._handshake: LinkHandshake | None = LinkHandshake(gateway.secret, initiator=False)
        self.transport: asyncio.Transport
        self.info: WorkerInfo | None = None
        self.load: Load | None = None
        self.alive_steps: list[int] = []
        self.cache: set[bytes] = set()
        self.cache_sequence = -1
        """Negative until all that is cached has been told."""
        self.failure: str | None = None
        self.is_open = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        assert self._handshake is not None
        transport.write(self._handshake.start())

    def data_received(self, data: bytes) -> None:
        if self._handshake is not None:
            step = self._handshake.feed(data)
            self.transport.write(step.to_send)
            if not step.done:
                return
            self._handshake, data = None, step.rest
            self.send(Hello(PROTOCOL_VERSION, self._gateway.gateway_id))
            self._gateway.links.append(self)
        for message in self._decoder.feed(data):
            self._on_message(message)
        self._gateway.changed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._gateway.changed.set()

    def send(self, message: ToWorker) -> None:
        self.transport.write(encode_frame(message))

    def _on_message(self, message: ToGateway) -> None:
        answers = self._gateway.answers
        match message:
            case Ready(info):
                self.info = info
            case Failed(reason):
                self.failure = reason
            case Alive(step):
                self.alive_steps.append(step)
            case CacheEvents(sequence, stored, removed, reset):
                if reset:
                    self.cache.clear()
                elif self.cache_sequence < 0:
                    return
                else:
                    assert sequence == self.cache_sequence + 1
                self.cache_sequence = sequence
                self.cache |= {stored[i : i + 32] for i in range(0, len(stored), 32)}
                self.cache -= {removed[i : i + 32] for i in range(0, len(removed), 32)}
            case StepFrame(load, prompts, deltas):
                self.load = load
                for prompt in prompts:
                    answers[prompt.request_id].prompt = prompt
                for delta in deltas:
                    self._gateway.on_delta(delta)
            case Rejected(request_id):
                answers[request_id].rejected = message
            case HandOffFailed(request_id):
                answers[request_id].failed.append(message)
            case Reserved(request_id):
                answers[request_id].reserved = message


class ScriptedGateway:
    """Listens for workers and does what a test says."""

    def __init__(self, address: str, secret: bytes | None = SECRET, gateway_id: str = "g") -> None:
        self.address = address
        self.secret = secret
        self.gateway_id = gateway_id
        self.links: list[JoinedWorker] = []
        self.answers: dict[int, Answer] = {}
        self.changed = asyncio.Event()
        self._num_requests = 0
        self._server: asyncio.Server | None = None

    async def listen(self) -> None:
        loop = asyncio.get_running_loop()
        if self.address.startswith("unix:"):
            path = self.address.removeprefix("unix:")
            self._server = await loop.create_unix_server(lambda: JoinedWorker(self), path)
        else:
            host, _, port = self.address.removeprefix("tcp:").rpartition(":")
            self._server = await loop.create_server(lambda: JoinedWorker(self), host, int(port))
            self.address = f"tcp:{host}:{self._server.sockets[0].getsockname()[1]}"

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for link in self.links:
            link.transport.abort()

    async def until(self, condition: Callable[[], object], limit_s: float = WAIT_LIMIT_S) -> None:
        async with asyncio.timeout(limit_s):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    def worker(self, role: Role, pid: int | None = None) -> JoinedWorker | None:
        """Return a ready worker that is connected."""
        for link in self.links:
            info = link.info
            if link.is_open and info and info.role == role and pid in (None, info.pid):
                return link
        return None

    async def ready(self, role: Role, pid: int | None = None) -> JoinedWorker:
        await self.until(lambda: self.worker(role, pid))
        found = self.worker(role, pid)
        assert found is not None
        return found

    def submit(
        self,
        worker: JoinedWorker,
        prompt: list[int],
        sampling: SamplingParams,
        *,
        decode: JoinedWorker | None = None,
        pull: PrefixPull | None = None,
    ) -> int:
        """Send a request to `worker`, to be handed to `decode` if there is one."""
        request_id = self._num_requests
        self._num_requests += 1
        self.answers[request_id] = Answer()
        submit = Submit(request_id, pack_ids(prompt), sampling, timeout_s=20.0, pull=pull)
        if decode is None:
            worker.send(submit)
            return request_id
        assert worker.info is not None
        decode.send(Reserve(submit, worker.info.instance_id))
        worker.send(
            Submit(
                request_id,
                submit.prompt,
                sampling,
                timeout_s=20.0,
                hand_off=HandOff(peer_of(decode)),
                pull=pull,
            )
        )
        return request_id

    def cancel(self, request_id: int, *workers: JoinedWorker) -> None:
        for worker in workers:
            if worker.is_open:
                worker.send(Cancel(request_id))

    async def finished(self, request_id: int, n: int = 1) -> Answer:
        answer = self.answers[request_id]
        await self.until(lambda: answer.is_done(n) or answer.rejected or answer.failed)
        assert answer.is_done(n), (answer.rejected, answer.failed)
        return answer

    async def idle(self, *workers: JoinedWorker, limit_s: float = 5.0) -> None:
        """Wait until nothing is held anywhere."""
        await self.until(
            lambda: all(
                worker.load is not None
                and (worker.load.kv_blocks_used, worker.load.hand_offs_open) == (0, 0)
                and (worker.load.running, worker.load.waiting) == (0, 0)
                for worker in workers
            ),
            limit_s,
        )

    def on_delta(self, delta: ChoiceDelta) -> None:
        answer = self.answers[delta.request_id]
        answer.tokens.setdefault(delta.choice, []).extend(unpack_ids(delta.tokens))
        if delta.finish_reason is not None:
            answer.finish[delta.choice] = delta.finish_reason


def peer_of(worker: JoinedWorker) -> Peer:
    assert worker.info is not None
    assert worker.info.peer is not None
    return worker.info.peer


class WorkerPrograms:
    """Worker processes with one model, ended with the test."""

    def __init__(self, folder: Path, model: Path, gateway: str, transport: str) -> None:
        self._folder = folder
        self._model = model
        self._gateway = gateway
        self._transport = transport
        self.processes: list[subprocess.Popen[bytes]] = []
        self.secret_file = folder / "secret"
        self.secret_file.write_bytes(SECRET)
        self.secret_file.chmod(0o600)

    def start(self, role: Role, **settings: object) -> subprocess.Popen[bytes]:
        number = len(self.processes)
        peer = f"unix:{self._folder}/p{number}" if self._transport == "unix" else "tcp:127.0.0.1:0"
        config = WorkerConfig(
            **{
                "model_path": str(self._model),
                "served_name": "tiny",
                "socket_path": "",
                "role": role,
                "threads": 1,
                "max_num_seqs": 8,
                "max_num_batched_tokens": 64,
                "kv_cache_bytes": 1 << 20,
                "join": (self._gateway,),
                "peer_address": peer,
                "secret_file": str(self.secret_file),
                "connector": "nixl" if self._transport == "nixl" else "socket",
                "lease_s": 1.5,
                **settings,
            }
        )
        with self.log(number).open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "twinfire.worker", encode_worker_config(config)],
                stdin=subprocess.PIPE,
                stderr=output,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self.processes.append(process)
        return process

    def log(self, number: int) -> Path:
        return self._folder / f"worker-{number}.log"

    def fault_hits(self, number: int) -> int:
        return self.log(number).read_text().count("twinfire fault")

    def close(self) -> None:
        for process in self.processes:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait(10)
            assert process.stdin is not None
            process.stdin.close()
