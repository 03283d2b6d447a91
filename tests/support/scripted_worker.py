"""A worker that computes nothing: it speaks the real protocol over a real socket, as told."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from typing import TypeVar

import msgspec

from twinfire.protocol.addresses import Address, UnixAddress
from twinfire.protocol.framing import encode_frame, worker_side_decoder
from twinfire.protocol.link_auth import LinkHandshake
from twinfire.protocol.messages import (
    Alive,
    ChoiceDelta,
    Fingerprint,
    FinishReason,
    HandOffTimes,
    Hello,
    Load,
    Peer,
    Preempted,
    PrefillProgress,
    PromptDone,
    Ready,
    Role,
    StepFrame,
    ToGateway,
    ToWorker,
    WorkerInfo,
)
from twinfire.protocol.tokens import pack_ids

MODEL = "model"
FINGERPRINT = Fingerprint("weights", "bf16", ("target:2:2:16:bf16",), 32, "kernels 1")
ALIVE_PERIOD_S = 0.05
M = TypeVar("M")


def scripted_info(name: str, role: Role = "mixed", **changes: object) -> WorkerInfo:
    info = WorkerInfo(
        instance_id=name,
        role=role,
        pid=1,
        model=MODEL,
        architecture="llama",
        dtype="bf16",
        vocab_size=1000,
        max_model_len=8192,
        block_size=32,
        num_kv_blocks=1000,
        kv_bytes_per_block=1 << 16,
        weight_bytes=0,
        max_num_seqs=64,
        fingerprint=FINGERPRINT,
        peer=Peer(name, f"unix:/nowhere/{name}"),
        max_num_batched_tokens=1024,
    )
    return msgspec.structs.replace(info, **changes)


class ScriptedWorker:
    """One connection to a gateway. It says that it lives until it is frozen or dies."""

    def __init__(self, info: WorkerInfo) -> None:
        self.info = info
        self.heard: list[ToWorker] = []
        """Every message, in order."""
        self.closed = asyncio.Event()
        self.step = itertools.count(1)
        self._num_read = 0
        self._came = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def dial(
        cls, address: Address, info: WorkerInfo, secret: bytes | None, tls: object = None
    ) -> ScriptedWorker:
        """Connect and prove the secret; the gateway knows nothing of the worker yet."""
        worker = cls(info)
        if isinstance(address, UnixAddress):
            reader, writer = await asyncio.open_unix_connection(address.path)
        else:
            reader, writer = await asyncio.open_connection(address.host, address.port, ssl=tls)
        worker.reader, worker.writer = reader, writer
        handshake = LinkHandshake(secret, initiator=True)
        writer.write(handshake.start())
        rest = b""
        while True:
            data = await reader.read(65536)
            if not data:
                raise handshake.closed()
            step = handshake.feed(data)
            writer.write(step.to_send)
            if step.done:
                rest = step.rest
                break
        worker._tasks.append(asyncio.create_task(worker._read(rest)))
        await worker.expect(Hello)
        return worker

    @classmethod
    async def join(
        cls, address: Address, info: WorkerInfo, secret: bytes | None, tls: object = None
    ) -> ScriptedWorker:
        """Connect and be ready."""
        worker = await cls.dial(address, info, secret, tls)
        worker.say(Ready(info))
        worker._tasks.append(asyncio.create_task(worker._live()))
        return worker

    def say(self, message: ToGateway) -> None:
        self.writer.write(encode_frame(message))

    def say_step(
        self,
        *,
        prompts: Iterable[PromptDone] = (),
        deltas: Iterable[ChoiceDelta] = (),
        progress: Iterable[PrefillProgress] = (),
        preempted: Iterable[Preempted] = (),
        load: Load | None = None,
    ) -> None:
        self.say(
            StepFrame(
                load or idle_load(next(self.step)),
                tuple(prompts),
                tuple(deltas),
                tuple(progress),
                tuple(preempted),
            )
        )

    def accept(
        self,
        request_id: int,
        first: dict[int, list[int]],
        *,
        cached: int = 0,
        hand_off: HandOffTimes | None = None,
        finish: FinishReason | None = None,
        queue_s: float = 0.0,
    ) -> None:
        """The prompt is done, with the first tokens of its choices, in one frame."""
        prompt = PromptDone(request_id, cached, queue_s, 0.0, hand_off=hand_off)
        deltas = [
            ChoiceDelta(request_id, choice, pack_ids(tokens), finish)
            for choice, tokens in first.items()
        ]
        self.say_step(prompts=[prompt], deltas=deltas)

    def output(
        self, request_id: int, choice: int, tokens: list[int], finish: FinishReason | None = None
    ) -> None:
        self.say_step(deltas=[ChoiceDelta(request_id, choice, pack_ids(tokens), finish)])

    async def expect(self, kind: type[M]) -> M:
        """Return the next message, which must be a `kind`."""
        message = await self.next()
        assert isinstance(message, kind), f"{self.info.instance_id} heard {message}"
        return message

    async def next(self) -> ToWorker:
        """Return the next message."""
        async with asyncio.timeout(5):
            while len(self.heard) <= self._num_read:
                assert not self.closed.is_set(), f"the link of {self.info.instance_id} is closed"
                self._came.clear()
                await self._came.wait()
        self._num_read += 1
        return self.heard[self._num_read - 1]

    @property
    def unread(self) -> list[ToWorker]:
        """What has come and was not asked for."""
        return self.heard[self._num_read :]

    def freeze(self) -> None:
        """Stand still, as a stopped process does."""
        for task in self._tasks:
            task.cancel()

    def stall(self) -> None:
        """Let only the engine stand still."""
        last = next(self.step)
        self.step = itertools.repeat(last)  # type: ignore[assignment]

    def die(self) -> None:
        """End, as a killed process does."""
        self.freeze()
        self.writer.transport.abort()
        self.closed.set()

    async def _read(self, first: bytes) -> None:
        decoder = worker_side_decoder()
        data = first
        while True:
            if data:
                self.heard += decoder.feed(data)
                self._came.set()
            try:
                data = await self.reader.read(65536)
            except OSError:
                data = b""
            if not data:
                self.closed.set()
                self._came.set()
                self.writer.close()
                return

    async def _live(self) -> None:
        while not self.closed.is_set():
            self.say(Alive(next(self.step)))
            await asyncio.sleep(ALIVE_PERIOD_S)


def idle_load(step: int) -> Load:
    return Load(
        step=step,
        running=0,
        waiting=0,
        kv_blocks_used=0,
        kv_blocks_total=1000,
        step_tokens=1,
        preemptions=0,
        prefix_queries=0,
        prefix_hits=0,
    )


def hand_off_times(prefill: str) -> HandOffTimes:
    return HandOffTimes(prefill, 0.001, 0.002, 0.0005, num_blocks=3, num_bytes=3 << 16)
